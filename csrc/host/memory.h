/* Device memory that outlives a call: counters, tables, scratch.
 *
 * It never comes from the caller's allocator: while that makes or warms up a graph it takes memory from a pool of
 * the graph's own, which must be empty after the call. It comes from the driver, 2 MiB at a time, zeroed, and stays
 * with this library until the process ends. What is given back is used again on the same stream, whose order alone
 * decides that the old work is over. A function that answers APEX_OK and null has none: the device is full, or a
 * graph is being captured that would hold on to it. The caller then takes memory of its own for this one call.
 */
#pragma once
#include "apex.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* `count` counters that are zero, for a kernel launched on the place's stream now, which leaves them zero.
 * Launches on one stream share theirs. A launch that is captured (`capturing`: apex_is_capturing's answer) gets some
 * that no other launch has, since its graph may be replayed beside anything; there are 65,536 a device for that. */
APEX_EXPORT int32_t apex_counters(const apex_place* place, int32_t capturing, size_t count, uint32_t** counters);

/* Memory for work on the place's stream alone, 512-byte aligned. Null during a capture. */
APEX_EXPORT int32_t apex_take_memory(const apex_place* place, size_t bytes, int32_t zeroed, void** memory);

/* Gives it back, with the same place and bytes. Calls no driver; null is nothing. */
APEX_EXPORT void apex_give_memory_back(const apex_place* place, size_t bytes, void* memory);

#if defined(__cplusplus)
}
#endif
