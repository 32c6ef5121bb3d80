// gpu.h for the SIMT executor of the tests (csrc/testing): compile with -DGPU_SIMT -DGPU_WARP_SIZE=32 or 64.
#pragma once
#include "testing/simt.h"

#define GPU_FN inline
// Says how many threads a block may have to GPU_REGISTER, which comes next: the executor refuses a launch of more. On a
// GPU such a launch fails, or runs with registers that the compiler did not allot.
#define GPU_KERNEL(...)                                              \
  extern "C++" template <>                                           \
  struct simt::LaunchBound<__COUNTER__> {                            \
    static constexpr unsigned threads = simt::first_of(__VA_ARGS__); \
  };                                                                 \
  extern "C"
// The tag gives every shared array an identity, so that each gets its own guarded allocation.
#define GPU_SHARED(T, name, n) \
  static char name##_tag;      \
  T(&name)[n] = *static_cast<T(*)[n]>(simt::shared(&name##_tag, sizeof(T) * (n)))
#define GPU_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(simt::dynamic_shared())
#define GPU_UNROLL_FOR for
#define GPU_ROLLED_FOR for
#define GPU_REGISTER(name) \
  static simt::Registration name##_registration(#name, &name, simt::LaunchBound<__COUNTER__ - 1>::threads);
#include "gpu_host_numbers.h"

namespace gpu {
GPU_FN u32 thread_x() { return simt::self->thread.x; }
GPU_FN u32 block_x() { return simt::current->block.x; }
GPU_FN u32 block_size_x() { return simt::current->block_size.x; }
GPU_FN u32 grid_x() { return simt::current->grid.x; }
GPU_FN u32 lane_id() { return simt::self->lane; }
GPU_FN void sync_threads(int line = __builtin_LINE()) { simt::barrier(line); }
// The whole block's barrier: what runs here gives every team as many turns.
GPU_FN void sync_team(u32, u32, int line = __builtin_LINE()) { simt::barrier(line); }
GPU_FN void loads_first() {}
GPU_FN void device_fence() {}
GPU_FN void await_writes() {}
GPU_FN void await_previous_kernel() {}
template <class T> GPU_FN T load_coherent(const T* p) { return *p; }
template <class T> GPU_FN T load_once(const T* p) { return *p; }
template <class T> GPU_FN T load_in_place(const T* p) { return *p; }
GPU_FN void prefetch(const void*) {}
GPU_FN u32 shuffle_xor(u32 x, int mask, int line = __builtin_LINE()) {
  return (u32)simt::exchange(x, lane_id() ^ mask, line);
}
GPU_FN u32 warp_uniform(u32 x) { return x; }
GPU_FN u32 atomic_increment(u32* p) { return (*p)++; }
// Copies to shared memory; where the hardware has no such copies beside the thread, it makes them itself.
template <int bytes> GPU_FN void copy_async(void* to_shared, const void* from_global) {
  struct alignas(bytes) Bytes { u32 words[bytes / 4]; };
  *(Bytes*)to_shared = *(const Bytes*)from_global;
}
GPU_FN void copy_async_commit() {}
template <int pending> GPU_FN void copy_async_wait() {}
template <class T> GPU_FN T* pinned_shared(T* p) { return p; }
template <class T> GPU_FN T* global_pointer(u64 address) { return reinterpret_cast<T*>(address); }
}  // namespace gpu
