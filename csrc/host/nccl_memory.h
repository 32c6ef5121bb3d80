/* Memory from NCCL (RCCL), which it can register for its collectives: torch.cuda.MemPool calls these two by name. */
#pragma once
#include "apex.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* Opens the library beside torch's. APEX_ERROR_NO_DRIVER: there is none, or it is older than NCCL 2.19. */
APEX_EXPORT int32_t apex_open_nccl(void);

/* Of the current device; null: apex_last_error() says why. `device` and `stream` are torch's, and not needed. */
APEX_EXPORT void* apex_nccl_allocate(size_t bytes, int32_t device, void* stream);
APEX_EXPORT void apex_nccl_free(void* memory, size_t bytes, int32_t device, void* stream);

#if defined(__cplusplus)
}
#endif
