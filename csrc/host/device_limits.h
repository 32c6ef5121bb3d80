// What launch configurations depend on, asked from each device once a process.
#pragma once
#include "apex.h"

namespace apex {
constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t most_threads = 0xffffffff;  // of a grid: HIP counts them in 32 bits

struct DeviceLimits {
  int32_t multiprocessors;
  int32_t warp_size;
  int32_t block_multiple;  // of threads: whole warps
  int64_t shared_bytes;    // dynamic, a block
};
// On the SIMT executor: small values that suit every build of it; its warps may have 32 or 64 threads.
int32_t device_limits(const apex_place& place, DeviceLimits* limits);
}  // namespace apex
