// Norms of few rows: a block has one, and a thread one vector of it.
//
// Nothing keeps the card busy then, and what counts is how long one block takes: all that it reads is on its way at
// once, and its threads do little each. In the backward, blocks beside those of the rows make the weights' gradients,
// some columns over all rows: mean and deviation of every row are known since the forward.
#pragma once
#include "column_sums.h"
#include "norm_arguments.h"
#include "normalized.h"

namespace gpu {
#if !defined(GPU_HOST)
constexpr int norm_few_warps = (int)norm_threads / warp_size;

// Sums over the block, for every thread. `partial`: of this call alone.
template <int N> GPU_FN void sum_over_block(float (&x)[N], Vector<float, 4> (&partial)[N * norm_few_warps / 4]) {
  GPU_UNROLL_FOR (int n = 0; n < N; ++n) x[n] = warp_reduce<Sum>(x[n]);
  const u32 warps = block_size_x() / warp_size;
  if (warps == 1) return;
  float* const of_warp = reinterpret_cast<float*>(partial) + thread_x() / warp_size;
  if (lane_id() == 0)
    GPU_UNROLL_FOR (int n = 0; n < N; ++n) of_warp[n * norm_few_warps] = x[n];
  sync_threads();
  GPU_UNROLL_FOR (int n = 0; n < N; ++n) x[n] = 0.0f;
  GPU_ROLLED_FOR(u32 warp = 0; warp < warps; warp += 4)
  GPU_UNROLL_FOR (int n = 0; n < N; ++n) {
    const Vector<float, 4> four = partial[(n * norm_few_warps + warp) / 4];
    GPU_UNROLL_FOR (u32 i = 0; i < 4; ++i) x[n] += warp + i < warps ? four.v[i] : 0.0f;
  }
}

template <bool centered, i32 types, int width> GPU_FN void norm_forward_few(const NormForward& a) {
  typedef Vector<float, 4> Quad;
  GPU_SHARED(Quad, of_mean, norm_few_warps / 4);
  GPU_SHARED(Quad, of_squares, norm_few_warps / 4);
  constexpr bool halves = types == type_f16 || types == type_bf16;  // as in norm_forward_rows
  const i32 input_type = known_type<types>(a.input_type), output_type = known_type<types>(a.output_type);
  const i64 row = block_x(), column = (i64)thread_x() * width;
  const bool has = column < a.hidden;
  Words input;
  Numbers<width> weight, bias;
  if (has) {
    input = load_words<width>(a.input + (row * a.hidden + column) * bytes_of(input_type), input_type);
    if (a.weight) weight.load(a.weight, a.weight_type, column);
    if (centered && a.bias) bias.load(a.bias, a.weight_type, column);
  }
  const float one_by_hidden = 1.0f / (float)a.hidden;
  const auto average = [&](float sum) { return halves ? sum * one_by_hidden : sum / (float)a.hidden; };
  float x[width] = {}, mean = 0.0f, total[1] = {0.0f};
  if (has) unpack(x, input, input_type);
  if constexpr (centered) {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) total[0] += x[i];
    sum_over_block(total, of_mean);
    mean = average(total[0]);
  }
  total[0] = 0.0f;
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
    x[i] -= mean;
    total[0] = fma(x[i], x[i], total[0]);
  }
  if (!has) total[0] = 0.0f;
  sum_over_block(total, of_squares);
  const float rstd =
      halves ? rsqrt(fma(total[0], one_by_hidden, (float)a.eps)) : 1.0f / sqrt(average(total[0]) + (float)a.eps);
  if (thread_x() == 0) {
    if (centered) reinterpret_cast<float*>(a.mean)[row] = mean;
    reinterpret_cast<float*>(a.rstd)[row] = rstd;
  }
  if (!has) return;
  float w[width], b[width];
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) w[i] = 1.0f, b[i] = 0.0f;
  if (a.weight) weight.get(w, a.weight_type);
  if (centered && a.bias) bias.get(b, a.weight_type);
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = fma(x[i] * rstd, w[i], b[i]);
  store_words<width>(a.output + (row * a.hidden + column) * bytes_of(output_type), output_type, pack(x, output_type));
}

// The weights' gradients of some columns over all rows.
template <bool centered, i32 types, int width>
GPU_FN void norm_backward_columns_of_few(const NormBackward& a, u32 block) {
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

// Of an input that was saved; nothing is added to its gradient.
template <bool centered, i32 types, int width> GPU_FN void norm_backward_few(const NormBackward& a) {
  constexpr int tensors = centered ? 2 : 1;
  typedef Vector<float, 4> Quad;
  GPU_SHARED(Quad, partial, tensors * norm_few_warps / 4);
  if (block_x() >= (u32)a.row_blocks)
    return norm_backward_columns_of_few<centered, types, width>(a, block_x() - (u32)a.row_blocks);
  const i32 input_type = known_type<types>(a.input_type), grad_type = known_type<types>(a.output_type);
  const i64 row = block_x(), column = (i64)thread_x() * width, at = row * a.hidden + column;
  const bool has = column < a.hidden;
  Words saved, grad;
  Numbers<width> weight;
  if (has) {
    saved = load_words<width>(a.saved + at * bytes_of(input_type), input_type);
    grad = load_words<width>(a.grad_output + at * bytes_of(grad_type), grad_type);
    if (a.weight) weight.load(a.weight, a.weight_type, column);
  }
  const Normalized<centered, float> normalized{centered ? load_statistic<float>(a.mean, row) : 0.0f,
                                               load_statistic<float>(a.rstd, row), 0.0f, false};
  float x[width] = {}, g[width] = {}, sums[tensors] = {};  // sums of x * g, and of g, where g = dy * weight
  if (has) {
    float w[width];
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) w[i] = 1.0f;
    if (a.weight) weight.get(w, a.weight_type);
    unpack(x, saved, input_type);
    unpack(g, grad, grad_type);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      x[i] = normalized.of_input(x[i]);
      g[i] *= w[i];
      sums[0] = fma(x[i], g[i], sums[0]);
      if constexpr (centered) sums[1] += g[i];
    }
  }
  sum_over_block(sums, partial);
  if (!has) return;
  const float scale = 1.0f / (float)a.hidden * normalized.rstd;
  const float along_x = sums[0] * scale, along_one = centered ? sums[tensors - 1] * scale : 0.0f;
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
    g[i] = fma(g[i], normalized.rstd, -along_one);
    g[i] = fma(-x[i], along_x, g[i]);
  }
  store_words<width>(a.grad_input + at * bytes_of(input_type), input_type, pack(g, input_type));
}
#endif
}  // namespace gpu
