// gpu.h for clang HIP, hipcc and hipRTC. Needs neither HIP's headers nor the device libraries
// (-nogpuinc -nogpulib): everything below is an attribute or a compiler builtin.
#pragma once

#define GPU_HIP 1
#if defined(__GFX9__)
#define GPU_WARP_SIZE 64
#else
#define GPU_WARP_SIZE 32
#endif
#define GPU_FN __attribute__((device)) inline __attribute__((always_inline))
#define GPU_KERNEL(threads, ...) __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define GPU_SHARED(T, name, n) static __attribute__((shared)) T name[n]
#define GPU_DYNAMIC_SHARED(T, name)                                                               \
  extern __attribute__((shared)) __attribute__((aligned(16))) unsigned char gpu_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(gpu_dynamic_shared)
#define GPU_UNROLL_FOR _Pragma("unroll") for
#define GPU_ROLLED_FOR _Pragma("unroll 1") for
#define GPU_REGISTER(name)

namespace gpu {
template <class To, class From> GPU_FN To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
  return __builtin_bit_cast(To, x);
}

GPU_FN u32 thread_x() { return __builtin_amdgcn_workitem_id_x(); }
GPU_FN u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
GPU_FN u32 block_size_x() { return __builtin_amdgcn_workgroup_size_x(); }
// hidden_block_count_x is the first implicit argument from code object v5 on.
GPU_FN u32 grid_x() { return ((const __attribute__((address_space(4))) u32*)__builtin_amdgcn_implicitarg_ptr())[0]; }
GPU_FN u32 lane_id() {
  return GPU_WARP_SIZE == 64 ? __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u))
                             : __builtin_amdgcn_mbcnt_lo(~0u, 0u);
}
GPU_FN void sync_threads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// No load is moved past it: those before it are on their way before what follows.
GPU_FN void loads_first() { __builtin_amdgcn_sched_barrier(0); }
GPU_FN void device_fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
// Returns when the wave's writes have arrived where another wave's device_fence() takes them along. Only gfx9 needs it:
// a barrier there waits for no writes, since waves of a block see each other's at once; a fence waits for its wave's.
GPU_FN void await_writes() {
#if defined(__GFX9__)
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#endif
}
GPU_FN void await_previous_kernel() {}
// Reads what another block wrote before its device_fence(), past this compute unit's first-level cache.
template <class T> GPU_FN T load_coherent(const T* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
GPU_FN u32 shuffle_xor(u32 x, int mask) {
  return (u32)__builtin_amdgcn_ds_bpermute((int)((lane_id() ^ mask) << 2), (int)x);
}
GPU_FN u32 warp_uniform(u32 x) { return (u32)__builtin_amdgcn_readfirstlane((int)x); }
// Any number of threads may raise one flag: they all write the same word.
GPU_FN void raise_flag(i32* flag) { *flag = 1; }
GPU_FN u32 atomic_increment(u32* p) {
  return __hip_atomic_fetch_add(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Within two units in the last place, for divisors of usual size: a fraction of an exact division's instructions.
GPU_FN float divide(float a, float b) { return a * __builtin_amdgcn_rcpf(b); }
GPU_FN double divide(double a, double b) { return a / b; }
// The hardware's own takes subnormal numbers for zero.
GPU_FN float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
GPU_FN float sqrt(float x) { return __builtin_sqrtf(x); }
GPU_FN double sqrt(double x) { return __builtin_sqrt(x); }
GPU_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
GPU_FN double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

GPU_FN float to_float(half x) { return (float)bit_cast<_Float16>(x.bits); }
GPU_FN void from_float(half& to, float x) { to.bits = bit_cast<u16>((_Float16)x); }
GPU_FN void from_float(bfloat16& to, float x) { to.bits = bit_cast<u16>((__bf16)x); }

// An address read from memory is a generic ("flat") pointer to the compiler; this says that it is global.
template <class T> GPU_FN T* global_pointer(u64 address) { return (T*)(__attribute__((address_space(1))) T*)address; }
}  // namespace gpu
