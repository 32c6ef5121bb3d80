// The weights' gradients of some columns over all rows, by one block.
//
// Of few rows this costs less than sums of parts of the rows, which others would have to wait for: mean and deviation
// of every row are known since the forward, so these blocks run beside those that make the input's gradient. The input
// was saved, not the output.
#pragma once
#include "column_sums.h"
#include "norm_arguments.h"
#include "normalized.h"

namespace gpu {
#if !defined(GPU_HOST)
template <bool centered, i32 types, int width>
GPU_FN void norm_backward_all_rows(const NormBackward& a, u32 block) {
  constexpr int in_flight = 2, tensors = centered ? 2 : 1;
  GPU_DYNAMIC_SHARED(float, shared);  // [slots][tensors][wide]
  const i32 saved_type = known_type<types>(a.input_type), grad_type = known_type<types>(a.output_type);
  const u32 lanes = (u32)a.column_threads, slots = block_size_x() / lanes, slot = thread_x() / lanes;
  const u32 wide = lanes * width, lane_column = thread_x() % lanes * width;
  const i64 first = (i64)block * wide, column = first + lane_column;
  float sums[tensors][width] = {};
  for (i64 row = slot; slot < slots && column < a.hidden && row < a.rows; row += slots * in_flight) {
    Words saved[in_flight], grad[in_flight];
    float mean[in_flight], rstd[in_flight];
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n) {
      const i64 at = row + n * slots;
      if (at >= a.rows) continue;
      saved[n] = load_words<width>(a.saved + (at * a.hidden + column) * bytes_of(saved_type), saved_type);
      grad[n] = load_words<width>(a.grad_output + (at * a.hidden + column) * bytes_of(grad_type), grad_type);
      mean[n] = load_statistic<float>(a.mean, at);
      rstd[n] = load_statistic<float>(a.rstd, at);
    }
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n) {
      if (row + n * slots >= a.rows) continue;
      const Normalized<centered, float> normalized{mean[n], rstd[n], 0.0f, false};
      float x[width], dy[width];
      unpack(x, saved[n], saved_type);
      unpack(dy, grad[n], grad_type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        sums[0][i] = fma(normalized.of_input(x[i]), dy[i], sums[0][i]);
        sums[tensors - 1][i] += centered ? dy[i] : 0.0f;
      }
    }
  }
  if (slot < slots)
    GPU_UNROLL_FOR (int t = 0; t < tensors; ++t)
      GPU_UNROLL_FOR (int i = 0; i < width; i += 4)
        *reinterpret_cast<Vector<float, 4>*>(shared + (slot * tensors + t) * wide + lane_column + i) =
            Vector<float, 4>{{sums[t][i], sums[t][i + 1], sums[t][i + 2], sums[t][i + 3]}};
  sync_threads();
  GPU_ROLLED_FOR(u32 v = thread_x(); v < tensors * wide; v += block_size_x()) {
    const bool of_bias = v >= wide;
    const i64 at = first + (of_bias ? v - wide : v);
    u8* const to = of_bias ? a.grad_bias : a.grad_weight;
    const float total[1] = {sum_apart(shared + v, slots, tensors * wide)};
    if (at < a.hidden && to) store_values(to, a.weight_type, at, total);
  }
}
#endif
}  // namespace gpu
