// Norms of few rows: a block has one, and a thread one vector of it.
//
// Nothing keeps the card busy then, and what counts is how long one block takes: all that it reads is on its way at
// once, and its threads do little each. In the backward, blocks beside those of the rows make the weights' gradients,
// some columns over all rows: mean and deviation of every row are known since the forward.
#pragma once
#include "cells.h"
#include "column_sums.h"
#include "norm_arguments.h"
#include "normalized.h"
#include "welford.h"

namespace gpu {
#if !defined(GPU_HOST)
constexpr int norm_few_warps = (int)norm_threads / warp_size;

// A tree: no chain of sums is long.
template <int count> GPU_FN float sum_in_pairs(const float (&x)[count]) {
  float sums[count];
  GPU_UNROLL_FOR (int i = 0; i < count; ++i) sums[i] = x[i];
  GPU_UNROLL_FOR (int half = count / 2; half; half /= 2)
    GPU_UNROLL_FOR (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}
// Of products.
template <int count> GPU_FN float sum_in_pairs(const float (&x)[count], const float (&y)[count]) {
  float sums[count / 2];
  GPU_UNROLL_FOR (int i = 0; i < count / 2; ++i) sums[i] = fma(x[2 * i], y[2 * i], x[2 * i + 1] * y[2 * i + 1]);
  return sum_in_pairs(sums);
}

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
    Vector<float, 4> four = partial[(n * norm_few_warps + warp) / 4];
    GPU_UNROLL_FOR (u32 i = 0; i < 4; ++i) four.v[i] = warp + i < warps ? four.v[i] : 0.0f;
    x[n] += sum_in_pairs(four.v);
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
    total[0] = sum_in_pairs(x);
    sum_over_block(total, of_mean);
    mean = average(total[0]);
  }
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] -= mean;
  total[0] = has ? sum_in_pairs(x, x) : 0.0f;
  sum_over_block(total, of_squares);
  const float rstd = halves ? rsqrt(fma(total[0], one_by_hidden, (float)a.eps))
                            : inverse_deviation(total[0], (float)a.hidden, (float)a.eps);
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

// The weights' gradients of some columns over all rows: a thread has two of them, of some rows.
template <bool centered, i32 types> GPU_FN void norm_backward_columns_of_few(const NormBackward& a, u32 block) {
  constexpr int in_flight = 4, tensors = centered ? 2 : 1, width = 2, lanes = norm_few_columns / width;
  const i32 saved_type = known_type<types>(a.input_type), grad_type = known_type<types>(a.output_type);
  const u32 slots = block_size_x() / lanes;
  const i64 first = (i64)block * norm_few_columns, column = first + thread_x() % lanes * width;
  float sums[tensors * width] = {};
  for (i64 row = thread_x() / lanes; column < a.hidden && row < a.rows; row += slots * in_flight) {
    Numbers<width> saved[in_flight], grad[in_flight];
    float mean[in_flight], rstd[in_flight];
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n) {
      const i64 at = row + n * slots;
      if (at >= a.rows) continue;
      saved[n].load(a.saved, saved_type, at * a.hidden + column);
      grad[n].load(a.grad_output, grad_type, at * a.hidden + column);
      mean[n] = centered ? load_statistic<float>(a.mean, at) : 0.0f;
      rstd[n] = load_statistic<float>(a.rstd, at);
    }
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n) {
      if (row + n * slots >= a.rows) continue;
      const Normalized<centered, float> normalized{mean[n], rstd[n], 0.0f, false};
      float x[width], dy[width];
      saved[n].get(x, saved_type);
      grad[n].get(dy, grad_type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        sums[i] = fma(normalized.of_input(x[i]), dy[i], sums[i]);
        if constexpr (centered) sums[width + i] += dy[i];
      }
    }
  }
  sum_over_rows<lanes, tensors * width, (int)norm_threads>(sums, [&](u32 lane, u32 n, float sum) {
    const i64 at = first + lane * width + n % width;
    u8* const to = n < width ? a.grad_weight : a.grad_bias;
    const float total[1] = {sum};
    if (at < a.hidden && to) store_values(to, a.weight_type, at, total);
  });
}

// Of an input that was saved; nothing is added to its gradient.
template <bool centered, i32 types, int width> GPU_FN void norm_backward_few(const NormBackward& a) {
  constexpr int tensors = centered ? 2 : 1;
  typedef Vector<float, 4> Quad;
  GPU_SHARED(Quad, partial, tensors * norm_few_warps / 4);
  if (block_x() >= (u32)a.row_blocks)
    return norm_backward_columns_of_few<centered, types>(a, block_x() - (u32)a.row_blocks);
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
    }
    sums[0] = sum_in_pairs(x, g);
    if constexpr (centered) sums[1] = sum_in_pairs(g);
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
