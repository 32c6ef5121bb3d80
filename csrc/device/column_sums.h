// Sums of a matrix's columns from the sums of its parts, in a fixed order: a bias's gradient.
#pragma once
#include "reduce.h"
#include "vectors.h"

namespace gpu {
constexpr int column_sums_threads = 256;
// Columns that a block takes: few where there are few, so that there are blocks enough.
GPU_FN u32 column_sums_columns(i64 columns) { return columns < 8192 ? 8 : 32; }

#if !defined(GPU_HOST)
// The sum of `count` numbers of shared memory, `apart` from one to the next.
template <class Math> GPU_FN Math sum_apart(const Math* numbers, u32 count, u32 apart) {
  constexpr u32 together = 16, sums = 4;
  Math total[sums] = {};
  GPU_ROLLED_FOR(u32 first = 0; first < count; first += together) {
    Math some[together];
    GPU_UNROLL_FOR (u32 n = 0; n < together; ++n) some[n] = first + n < count ? numbers[(first + n) * apart] : Math(0);
    GPU_UNROLL_FOR (u32 n = 0; n < together; ++n) total[n % sums] += some[n];
  }
  return (total[0] + total[1]) + (total[2] + total[3]);
}

// Sums over a block whose threads share `count` numbers each among `lanes` side by side: each(lane, n, total) for every
// lane and number, in some thread. A tree, so that no chain of sums is long.
template <int lanes, int count, int most_threads, class Math, class Each>
GPU_FN void sum_over_rows(Math (&x)[count], const Each& each) {
  constexpr u32 most_warps = most_threads / warp_size, numbers = lanes * count;
  GPU_SHARED(Math, shared, numbers * most_warps);
  GPU_UNROLL_FOR (int mask = lanes; mask < warp_size; mask *= 2)
    GPU_UNROLL_FOR (int n = 0; n < count; ++n) x[n] += shuffle_xor_value(x[n], mask);
  const u32 warps = block_size_x() / warp_size, lane = lane_id();
  if (lane < lanes)
    GPU_UNROLL_FOR (int n = 0; n < count; ++n) shared[(n * lanes + lane) * most_warps + thread_x() / warp_size] = x[n];
  sync_threads();
  GPU_ROLLED_FOR(u32 first = thread_x() - lane; first < numbers * most_warps; first += block_size_x()) {
    const u32 at = first + lane, number = at / most_warps;
    const bool has = at < numbers * most_warps && at % most_warps < warps;
    Math total = has ? shared[at] : Math(0);
    GPU_UNROLL_FOR (u32 mask = most_warps / 2; mask; mask /= 2) total += shuffle_xor_value(total, (int)mask);
    if (has && at % most_warps == 0) each(number % lanes, number / lanes, total);
  }
}

// partials: [parts][columns]; out: [columns] of `type`. A block takes some columns, and groups of its threads take
// parts, each several at once.
template <class Math> GPU_FN void column_sums(const Math* partials, i64 parts, i64 columns, u8* out, i32 type) {
  constexpr u32 together = 8;
  GPU_SHARED(Math, sums, column_sums_threads);
  const u32 wide = column_sums_columns(columns);
  const u32 groups = block_size_x() / wide, group = thread_x() / wide, lane = thread_x() % wide;
  const i64 column = (i64)block_x() * wide + lane;
  Math total = Math(0);
  for (i64 part = group; column < columns && part < parts; part += together * groups) {
    Math loaded[together];
    GPU_UNROLL_FOR (u32 n = 0; n < together; ++n)
      loaded[n] = part + n * groups < parts ? partials[(part + n * groups) * columns + column] : Math(0);
    GPU_UNROLL_FOR (u32 n = 0; n < together; ++n) total += loaded[n];
  }
  for (u32 mask = wide; mask < warp_size; mask *= 2) total += shuffle_xor_value(total, (int)mask);
  if (lane_id() < wide) sums[thread_x() / warp_size * wide + lane] = total;
  sync_threads();
  if (thread_x() >= wide || column >= columns) return;
  for (u32 warp = 1; warp < block_size_x() / warp_size; ++warp) total += sums[warp * wide + lane];
  Math x[1] = {total};
  store_values(out, type, column, x);
}
#endif
}  // namespace gpu
