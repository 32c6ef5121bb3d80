// The kernel of kept_magnitudes.h: a warp has a group, a lane every warp_size-th row, whose eight elements are fetched
// while those of the row before are worked on. Per row 155 maxima and 190 additions.
#include "kept_magnitudes.h"

#include "reduce.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
GPU_FN float magnitude(float x) { return bit_cast<float>(bit_cast<u32>(x) & 0x7fffffffu); }

GPU_FN void fetch(float (&x)[8], const float* const (&column)[8], i64 row, i64 rows) {
  GPU_UNROLL_FOR (int c = 0; c < kept_columns; ++c) x[c] = row < rows ? magnitude(column[c][row]) : 0.0f;
}

// A group with an index outside is nan, and reads nothing.
GPU_FN void keep_magnitudes(const KeptMagnitudes& a, i64 group) {
  constexpr int results = (kept_fours + warp_size - 1) / warp_size;
  const float* column[kept_columns];
  bool inside = true;
  GPU_UNROLL_FOR (int c = 0; c < kept_columns; ++c) {
    const i32 index = a.groups[group * kept_columns + c];
    inside = inside && index >= 0 && index < a.count;
    column[c] = a.columns + (inside ? index : 0) * a.rows;
  }
  float sums[kept_fours] = {}, x[kept_columns], next[kept_columns];
  const i64 lane = lane_id(), rows = inside ? a.rows : 0;
  fetch(x, column, lane, rows);
  for (i64 row = lane; row < rows; row += warp_size) {
    fetch(next, column, row + warp_size, rows);
    add_fours<0>(x, sums);
    GPU_UNROLL_FOR (int c = 0; c < kept_columns; ++c) x[c] = next[c];
  }
  float mine[results];  // the sums that this lane writes
  GPU_UNROLL_FOR (int four = 0; four < kept_fours; ++four) {
    const float sum = warp_reduce<Sum>(sums[four]);
    if (four % warp_size == 0 || lane == four % warp_size) mine[four / warp_size] = sum;
  }
  GPU_UNROLL_FOR (int r = 0; r < results; ++r) {
    const int four = r * warp_size + (int)lane;
    if (four < kept_fours) a.sums[group * kept_fours + four] = inside ? mine[r] : bit_cast<float>(0x7fc00000u);
  }
}
#endif
}  // namespace
}  // namespace gpu

extern "C" GPU_KERNEL(gpu::kept_threads) void kept_magnitudes_f32(gpu::KeptMagnitudes arguments) {
  constexpr gpu::u32 warps = gpu::kept_threads / gpu::warp_size;
  for (gpu::i64 group = (gpu::i64)gpu::block_x() * warps + gpu::thread_x() / gpu::warp_size;
       group < arguments.groups_count; group += (gpu::i64)gpu::grid_x() * warps)
    gpu::keep_magnitudes(arguments, group);
}
GPU_REGISTER(kept_magnitudes_f32)
