// The weights' gradients of the norms: partial sums over some rows, and their sums. Their order is fixed.
#pragma once
#include "norm_arguments.h"
#include "norm_layout.h"
#include "norm_long.h"

namespace gpu {
#if !defined(GPU_HOST)
// Partial sums of the weights' gradients. The grid is column_blocks wide and `parts` high, a block column_threads
// wide: its other threads take other rows of the same columns, and are added up at the end.
template <bool centered, class Math> GPU_FN void norm_backward_columns(const NormBackward& a) {
  GPU_SHARED(Math, sums, 2 * norm_threads);
  const u32 threads = block_size_x(), wide = (u32)a.column_threads, high = threads / wide;
  const u32 x_block = block_x() % (u32)a.column_blocks;
  const i64 part = block_x() / (u32)a.column_blocks;
  const u32 lane = thread_x() % wide, of_row = thread_x() / wide;
  const i64 column = (i64)x_block * wide + lane;
  Math of_weight = Math(0), of_bias = Math(0);
  if (column < a.hidden) {
    for (i64 row = part * high + of_row; row < a.rows; row += a.parts * high) {
      const Normalized<centered, Math> normalized{load_statistic<Math>(a.mean, row), load_statistic<Math>(a.rstd, row),
                                                  (Math)a.eps, a.from_output != 0};
      Math x[1], dy[1], w[1];
      load_gradient(a, normalized, row * a.hidden, column, x, dy, w);
      of_weight = fma(x[0], dy[0], of_weight);
      of_bias += dy[0];
    }
  }
  sums[thread_x()] = of_weight;
  sums[norm_threads + thread_x()] = of_bias;
  sync_threads();
  if (of_row != 0 || column >= a.hidden) return;
  for (u32 r = 1; r < high; ++r) {
    of_weight += sums[r * wide + lane];
    of_bias += sums[norm_threads + r * wide + lane];
  }
  const i64 pitch = norm_partials_pitch(a.hidden);
  Math* const partials = reinterpret_cast<Math*>(a.partials);
  partials[part * pitch + column] = of_weight;
  if (centered) partials[(a.parts + part) * pitch + column] = of_bias;
}

// A block takes norm_sum_columns columns, a thread four of them, and its groups of threads take parts.
template <bool centered, class Math> GPU_FN void norm_backward_finish(const NormBackward& a) {
  constexpr u32 wide = norm_sum_columns / 4;
  constexpr int tensors = centered ? 2 : 1, at_once = 5;  // parts: all there are, with two blocks a multiprocessor
  typedef Vector<Math, 16 / sizeof(Math)> Words16;
  struct Four {
    Math v[4];
    GPU_FN static Four load(const Math* p) {
      Four four;
      GPU_UNROLL_FOR (int i = 0; i < 4; i += 16 / sizeof(Math)) {
        const Words16 words = *reinterpret_cast<const Words16*>(p + i);
        GPU_UNROLL_FOR (int k = 0; k < (int)(16 / sizeof(Math)); ++k) four.v[i + k] = words.v[k];
      }
      return four;
    }
    GPU_FN void add(const Four& more) {
      GPU_UNROLL_FOR (int i = 0; i < 4; ++i) v[i] += more.v[i];
    }
  };
  GPU_SHARED(Four, sums, tensors * norm_threads);
  const u32 groups = block_size_x() / wide, lane = thread_x() % wide, group = thread_x() / wide;
  const i64 column = (i64)block_x() * norm_sum_columns + lane * 4, pitch = norm_partials_pitch(a.hidden);
  Four total[tensors] = {};
  if (column < a.hidden) {
    const Math* const mine = reinterpret_cast<const Math*>(a.partials) + column;
    for (i64 part = group; part < a.parts; part += at_once * groups) {
      Four loaded[tensors][at_once] = {};
      GPU_UNROLL_FOR (int t = 0; t < tensors; ++t)
        GPU_UNROLL_FOR (int n = 0; n < at_once; ++n)
          if (part + n * groups < a.parts) loaded[t][n] = Four::load(mine + (t * a.parts + part + n * groups) * pitch);
      GPU_UNROLL_FOR (int t = 0; t < tensors; ++t)
        GPU_UNROLL_FOR (int n = 0; n < at_once; ++n) total[t].add(loaded[t][n]);
    }
  }
  GPU_UNROLL_FOR (int t = 0; t < tensors; ++t) sums[t * norm_threads + thread_x()] = total[t];
  for (u32 half = groups / 2; half; half /= 2) {  // groups are a power of two
    sync_threads();
    if (group >= half) continue;
    GPU_UNROLL_FOR (int t = 0; t < tensors; ++t) {
      total[t].add(sums[t * norm_threads + thread_x() + half * wide]);
      sums[t * norm_threads + thread_x()] = total[t];
    }
  }
  if (group != 0) return;
  for (i64 i = 0; i < 4 && column + i < a.hidden; ++i) {
    Math x[1] = {total[0].v[i]};
    store_values(a.grad_weight, a.weight_type, column + i, x);
    x[0] = total[tensors - 1].v[i];
    if (centered && a.grad_bias) store_values(a.grad_bias, a.weight_type, column + i, x);
  }
}
#endif
}  // namespace gpu
