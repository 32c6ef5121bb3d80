/* Exchanging halos through shared memory: csrc/device/push_pull_halos.h says how. */
#pragma once
#include "apex.h"
#include "device/push_pull_halos_arguments.h"

/* Exchanges with both neighbours at once. `multiprocessors`: as many of the device's at most; 0: all. On a CPU it
 * returns when all has arrived, or nobody has answered in time (`fault` says so; the answer is APEX_OK). */
extern "C" APEX_EXPORT int32_t apex_push_pull_halos(const apex_place* place, const gpu::PushPullHalos* arguments,
                                                    int32_t multiprocessors);

/* Keeps the place's stream busy for so long. */
extern "C" APEX_EXPORT int32_t apex_add_delay(const apex_place* place, int64_t nanoseconds);

namespace apex {
void push_pull_halos_cpu(const gpu::PushPullHalos& a);
}  // namespace apex
