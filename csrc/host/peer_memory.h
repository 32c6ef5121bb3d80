/* Device memory that several processes of one machine share, through the IPC of the driver that is loaded. */
#pragma once
#include "apex.h"

#if defined(__cplusplus)
extern "C" {
#endif

#define APEX_PEER_HANDLE_BYTES 64 /* CUipcMemHandle, hipIpcMemHandle_t */

/* Zeroed memory of the place's device. Null: the device has none left. It takes whole units of 2 MiB: a driver puts
 * smaller pieces side by side, and would share the neighbours, too. */
APEX_EXPORT int32_t apex_peer_allocate(const apex_place* place, size_t bytes, void** memory);
/* All that was queued there must be done. */
APEX_EXPORT int32_t apex_peer_free(const apex_place* place, void* memory);

/* The 64 bytes by which other processes open it. */
APEX_EXPORT int32_t apex_peer_handle(const apex_place* place, const void* memory, void* handle);
/* Another process's memory, for kernels of this place's device. Each process opens a handle once. */
APEX_EXPORT int32_t apex_peer_open(const apex_place* place, const void* handle, void** memory);
APEX_EXPORT int32_t apex_peer_close(const apex_place* place, void* memory);

/* Zeroes memory, in its turn on the place's stream. */
APEX_EXPORT int32_t apex_peer_zero(const apex_place* place, void* memory, size_t bytes);

#if defined(__cplusplus)
}
#endif
