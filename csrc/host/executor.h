/* The SIMT executor of the tests (apex_set_executor). */
#pragma once
#include "driver.h"

namespace apex {

bool has_executor();

/* Runs the kernel of this name on the executor. */
int32_t execute(const char* kernel, apex_dim grid, apex_dim block, uint32_t dynamic_shared_bytes, void** parameters);

}  // namespace apex
