// What another lane of the warp has, whichever each lane asks for; and values that stay in registers.
#pragma once
#include "gpu.h"

namespace gpu {
#if defined(GPU_SIMT)
GPU_FN u32 shuffle_from(u32 x, u32 lane, int line = __builtin_LINE()) { return (u32)simt::exchange(x, lane, line); }
#elif defined(GPU_HIP)
GPU_FN u32 shuffle_from(u32 x, u32 lane) { return (u32)__builtin_amdgcn_ds_bpermute((int)(lane << 2), (int)x); }
GPU_FN void prefetch(const void*) {}
#elif defined(GPU_CUDA)
// For all threads of the warp together.
GPU_FN u32 shuffle_from(u32 x, u32 lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }
#endif
#if !defined(GPU_HOST)
GPU_FN float shuffle_value_from(float x, u32 lane) { return bit_cast<float>(shuffle_from(bit_cast<u32>(x), lane)); }
GPU_FN double shuffle_value_from(double x, u32 lane) {
  const u64 bits = bit_cast<u64>(x);
  const u64 low = shuffle_from((u32)bits, lane), high = shuffle_from((u32)(bits >> 32), lane);
  return bit_cast<double>(high << 32 | low);
}
// x in a register, of which the compiler knows nothing more: it neither makes it again nor splits code by its value.
GPU_FN u32 pinned(u32 x) {
#if defined(GPU_CUDA)
  asm volatile("" : "+r"(x));
#endif
  return x;
}
#endif
}  // namespace gpu
