// Rows of so few elements in all that nothing keeps the card busy, and what counts is how long one thread takes: a
// vector a thread, a row's threads in one block, and as few instructions as will do, since most of them come from
// memory.
#pragma once
#include "exponential.h"
#include "reduce.h"

namespace gpu {
constexpr u32 few_row_threads = 256;    // of a row, at most
constexpr u32 few_least_warp = 32;      // on any card: a row of more threads has a block alone
constexpr u32 few_block_threads = 128;  // of a block of shorter rows

#if !defined(GPU_HOST)
// n / d for n * d below 2^32; share: 2^32 / d, rounded up, or 0 where d is 1.
GPU_FN u32 divide_by_share(u32 n, u32 share) { return share ? (u32)((u64)n * share >> 32) : n; }

struct Larger {  // a nan is no number: the other one
  static GPU_FN float combine(float a, float b) { return max_number(a, b); }
};

// A thread's place: 2^log_threads share a row, in a block alone where they may be more than a warp.
struct FewRow {
  static constexpr u32 most_warps = few_row_threads / warp_size;
  u32 row, rank, threads;

  GPU_FN explicit FewRow(i32 log_threads) : threads(1u << log_threads) {
    const u32 item = block_x() * block_size_x() + thread_x();
    row = item >> log_threads;
    rank = item & (threads - 1);
  }
  // Each x over the row, for all threads of the block together; every thread of the row gets the results. `partial`,
  // of shared memory, most_warps of each x, is one call's alone.
  template <class Reduction, int count> GPU_FN void reduce(float (&x)[count], float* partial) const {
    GPU_UNROLL_FOR (int mask = warp_size / 2; mask; mask >>= 1)
      GPU_UNROLL_FOR (int k = 0; k < count; ++k) {
        const float other = shuffle_xor_value(x[k], mask);
        if ((u32)mask < threads) x[k] = Reduction::combine(x[k], other);
      }
    if (threads <= warp_size) return;
    if (lane_id() == 0)
      GPU_UNROLL_FOR (int k = 0; k < count; ++k) partial[k * most_warps + thread_x() / warp_size] = x[k];
    sync_threads();
    const u32 warps = threads / warp_size;
    GPU_UNROLL_FOR (int k = 0; k < count; ++k) {
      float of_warp[most_warps] = {};
      GPU_UNROLL_FOR (u32 w = 0; w < most_warps; ++w)
        if (w < warps) of_warp[w] = partial[k * most_warps + w];
      GPU_UNROLL_FOR (u32 half = most_warps / 2; half; half /= 2)  // in pairs: fewer roundings follow one another
        if (half < warps)
          GPU_UNROLL_FOR (u32 w = 0; w < half; ++w) of_warp[w] = Reduction::combine(of_warp[w], of_warp[w + half]);
      x[k] = of_warp[0];
    }
  }
};
#endif
}  // namespace gpu
