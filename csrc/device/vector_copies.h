// Copies of vectors of 16 bytes to shared memory, which run beside the thread where the hardware can do that.
#pragma once
#include "vectors.h"

namespace gpu {
#if !defined(GPU_HOST)
#if defined(GPU_HIP)
constexpr bool copies_run_beside = false;
GPU_FN void copy_vector(void* to_shared, const void* from) {
  *static_cast<Words*>(to_shared) = *static_cast<const Words*>(from);
}
GPU_FN void end_copies() {}
template <int pending> GPU_FN void await_copies() {}
#else
constexpr bool copies_run_beside = true;
GPU_FN void copy_vector(void* to_shared, const void* from) { copy_async<16>(to_shared, from); }
// Those since the last call make a group.
GPU_FN void end_copies() { copy_async_commit(); }
// Returns when all but the newest `pending` groups of this thread have arrived; only this thread sees them then.
template <int pending> GPU_FN void await_copies() { copy_async_wait<pending>(); }
#endif
#endif
}  // namespace gpu
