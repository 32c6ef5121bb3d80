// Reductions over a warp and a block. Deterministic: the order of every sum is fixed.
#pragma once
#include "gpu.h"

namespace gpu {
struct Sum {
  template <class T> static GPU_FN T combine(T a, T b) { return a + b; }
};
struct Maximum {  // of magnitudes: nothing is below zero; a nan stays
  template <class T> static GPU_FN T combine(T a, T b) { return b > a || b != b ? b : a; }
};

#if !defined(GPU_HOST)
GPU_FN float shuffle_xor_value(float x, int mask) { return bit_cast<float>(shuffle_xor(bit_cast<u32>(x), mask)); }
GPU_FN double shuffle_xor_value(double x, int mask) {
  const u64 bits = bit_cast<u64>(x);
  const u64 low = shuffle_xor((u32)bits, mask), high = shuffle_xor((u32)(bits >> 32), mask);
  return bit_cast<double>(high << 32 | low);
}

template <class Reduction, class T> GPU_FN T warp_reduce(T x) {
  GPU_UNROLL_FOR (int mask = warp_size / 2; mask; mask >>= 1) x = Reduction::combine(x, shuffle_xor_value(x, mask));
  return x;
}

// Over all threads of the block (a whole number of warps, at most 1024 threads); every thread gets the result.
template <class Reduction, class T> GPU_FN T block_reduce(T x) {
  GPU_SHARED(T, partial, 1024 / warp_size);
  x = warp_reduce<Reduction>(x);
  sync_threads();  // readers of an earlier call may still be at work
  const u32 warp = thread_x() / warp_size, warps = block_size_x() / warp_size;
  if (lane_id() == 0) partial[warp] = x;
  sync_threads();
  x = lane_id() < warps ? partial[lane_id()] : T(0);
  return warp_reduce<Reduction>(x);
}

// Counts this block in; true, to all its threads, in the block that completes `count` (the counter is 0 again). What
// the blocks wrote before is there for it to read with load_coherent.
GPU_FN bool is_last_of(u32* counter, u32 count, u32 (&is_last)[1]) {
  await_writes();
  sync_threads();
  if (thread_x() == 0) {
    device_fence();
    is_last[0] = atomic_increment(counter) == count - 1;
    if (is_last[0]) *counter = 0;
    device_fence();
  }
  sync_threads();
  return is_last[0];
}
#endif
}  // namespace gpu
