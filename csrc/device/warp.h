// What the threads of a warp tell one another beyond exchanges (gpu.h): barriers, and one lane's value for all.
#pragma once
#include "reduce.h"

namespace gpu {
#if defined(GPU_SIMT)
GPU_FN void sync_warp(int line = __builtin_LINE()) { simt::warp_barrier(line); }
GPU_FN u32 broadcast(u32 x, u32 lane, int line = __builtin_LINE()) { return (u32)simt::exchange(x, lane, line); }
#elif defined(GPU_HIP)
// A wave's accesses to shared memory keep their order: only the compiler needs to be told.
GPU_FN void sync_warp() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
GPU_FN u32 broadcast(u32 x, u32 lane) { return (u32)__builtin_amdgcn_readlane((int)x, (int)lane); }
#elif defined(GPU_CUDA)
// For all threads of the warp together: what each wrote before it, the others can read after it.
GPU_FN void sync_warp() { __syncwarp(); }
// What `lane`, the same for all, has; for all threads of the warp together.
GPU_FN u32 broadcast(u32 x, u32 lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }
#endif
#if !defined(GPU_HOST)
GPU_FN float broadcast_value(float x, u32 lane) { return bit_cast<float>(broadcast(bit_cast<u32>(x), lane)); }
#endif
}  // namespace gpu
