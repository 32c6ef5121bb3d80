// Words that another device, or another process, writes while this kernel runs, and a clock for those who wait for
// them.
#pragma once
#include "gpu.h"

namespace gpu {
// Two words: each of them is read, and written, as a whole.
#if defined(GPU_CUDA)
GPU_FN void load_system(const u64* p, u64& first, u64& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}
GPU_FN void store_system(u64* p, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(first), "l"(second) : "memory");
}
#elif defined(GPU_HIP)
GPU_FN void load_system(const u64* p, u64& first, u64& second) {
  first = __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  second = __hip_atomic_load(p + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
GPU_FN void store_system(u64* p, u64 first, u64 second) {
  __hip_atomic_store(p, first, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  __hip_atomic_store(p + 1, second, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
#else
GPU_FN void load_system(const u64* p, u64& first, u64& second) {
  first = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  second = __atomic_load_n(p + 1, __ATOMIC_ACQUIRE);
}
GPU_FN void store_system(u64* p, u64 first, u64 second) {
  __atomic_store_n(p, first, __ATOMIC_RELEASE);
  __atomic_store_n(p + 1, second, __ATOMIC_RELEASE);
}
#endif

// Of a clock that runs on.
#if defined(GPU_CUDA)
GPU_FN i64 nanoseconds() {
  i64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}
#elif defined(GPU_HIP)
GPU_FN i64 nanoseconds() {
#if __has_builtin(__builtin_readsteadycounter)
  return (i64)__builtin_readsteadycounter() * 10;  // 100 MHz
#else
  return (i64)__builtin_readcyclecounter() / 2;  // compilers of ROCm 6 know the shader's own alone, about 2 GHz
#endif
}
#elif defined(GPU_SIMT)
inline i64 nanoseconds() {
  static i64 now = 0;
  return now += 100;
}
#endif
}  // namespace gpu
