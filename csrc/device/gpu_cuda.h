// gpu.h for nvcc and NVRTC.
#pragma once

#define GPU_CUDA 1
#define GPU_WARP_SIZE 32
#define GPU_FN __device__ __forceinline__
// GPU_KERNEL(threads), or (threads, blocks): at most so many threads, registers for at least so many blocks at once.
#define GPU_KERNEL(...) __global__ __launch_bounds__(__VA_ARGS__)
#define GPU_SHARED(T, name, n) __shared__ T name[n]
#define GPU_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char gpu_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(gpu_dynamic_shared)
#define GPU_UNROLL_FOR _Pragma("unroll") for
#define GPU_ROLLED_FOR _Pragma("unroll 1") for
#define GPU_REGISTER(name)

namespace gpu {
template <class To, class From> GPU_FN To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
  return __builtin_bit_cast(To, x);
}

GPU_FN u32 thread_x() { return threadIdx.x; }
GPU_FN u32 block_x() { return blockIdx.x; }
GPU_FN u32 block_size_x() { return blockDim.x; }
GPU_FN u32 grid_x() { return gridDim.x; }
GPU_FN u32 lane_id() {
  u32 lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
GPU_FN void sync_threads() { __syncthreads(); }
// A barrier of the block's team `team`, 0 to 14, alone: `threads` threads, whole warps.
GPU_FN void sync_team(u32 team, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}
// For all threads of a warp together. No load is moved past it: those before it are on their way before what follows.
GPU_FN void loads_first() { __syncwarp(); }
GPU_FN void device_fence() { __threadfence(); }
GPU_FN void await_writes() {}  // a fence takes along what it sees
// A kernel that is launched beside the end of the one before it (apex_kernel.awaits) calls this before it touches any
// memory: it returns when that kernel and its writes are done. And it lets the next one begin.
GPU_FN void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Reads what another block wrote before its device_fence(), past this multiprocessor's first-level cache.
GPU_FN float load_coherent(const float* p) {
  float x;
  asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(x) : "l"(p));
  return x;
}
GPU_FN double load_coherent(const double* p) {
  double x;
  asm volatile("ld.volatile.global.f64 %0, [%1];" : "=d"(x) : "l"(p));
  return x;
}
// Sixteen bytes that no thread reads again: they take no room in the first-level cache.
template <class T> GPU_FN T load_once(const T* p) {
  struct { u32 words[4]; } x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
               : "l"(p));
  return bit_cast<T>(x);
}
// Sixteen bytes of shared memory, read here: the compiler would read them earlier, into registers that are needed.
template <class T> GPU_FN T load_in_place(const T* p) {
  struct { u32 words[4]; } x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
               : "r"((u32)__cvta_generic_to_shared(p)));
  return bit_cast<T>(x);
}
// A line of memory that is read soon: it comes to the second-level cache.
GPU_FN void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
GPU_FN u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
// A value that is the same in all threads of the warp: said so, branches on it need no care for divergence.
GPU_FN u32 warp_uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }
// Any number of threads may raise one flag: they all write the same word.
GPU_FN void raise_flag(i32* flag) { *flag = 1; }
GPU_FN u32 atomic_increment(u32* p) { return ::atomicAdd(p, 1u); }

// Within two units in the last place, for divisors of usual size: a fraction of an exact division's instructions.
GPU_FN float divide(float a, float b) { return __fdividef(a, b); }
GPU_FN double divide(double a, double b) { return a / b; }
// Within two units in the last place.
GPU_FN float rsqrt(float x) { return ::rsqrtf(x); }
GPU_FN float sqrt(float x) { return ::sqrtf(x); }
GPU_FN double sqrt(double x) { return ::sqrt(x); }
GPU_FN float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
GPU_FN double fma(double a, double b, double c) { return ::fma(a, b, c); }

GPU_FN float to_float(half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
GPU_FN void from_float(half& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
GPU_FN void from_float(bfloat16& to, float x) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  const u32 u = bit_cast<u32>(x);
  to.bits = (u & 0x7fffffffu) > 0x7f800000u ? (u16)0x7fff : (u16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
#endif
}

// Copies to shared memory that run beside the thread; those since the last commit make a group.
template <int bytes> GPU_FN void copy_async(void* to_shared, const void* from_global) {
#if __CUDA_ARCH__ >= 800
  const u32 to = (u32)__cvta_generic_to_shared(to_shared);
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from_global) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from_global), "n"(bytes) : "memory");
#else
  struct alignas(bytes) Bytes { u32 words[bytes / 4]; };
  *(Bytes*)to_shared = *(const Bytes*)from_global;
#endif
}
GPU_FN void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Returns when all but the newest `pending` groups of this thread have arrived; only this thread sees them then.
template <int pending> GPU_FN void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// An address of shared memory in a register: the compiler would compute it again at every use.
template <class T> GPU_FN T* pinned_shared(T* p) {
  u32 address = (u32)__cvta_generic_to_shared(p);
  asm volatile("mov.u32 %0, %0;" : "+r"(address));
  return (T*)__cvta_shared_to_generic(address);
}

// An address read from memory is a generic pointer to the compiler; this says that it is global.
template <class T> GPU_FN T* global_pointer(u64 address) { return (T*)__cvta_global_to_generic(address); }
}  // namespace gpu
