// Norms of rows of any length: a row is read once for each step.
#pragma once
#include "norm_codes.h"
#include "normalized.h"
#include "reduce.h"

namespace gpu {
#if !defined(GPU_HOST)
template <bool centered, class Math, int width, class Output = NormNumbers>
GPU_FN auto norm_forward_long(const NormForward& a, Output out = {}) {
  const i64 step = (i64)block_size_x() * width, mine = (i64)thread_x() * width;
  for (i64 row = block_x(); row < a.rows; row += grid_x()) {
    const i64 begin = row * a.hidden;
    const u8* const input = a.residual ? a.sum : a.input;  // a thread reads what it wrote itself
    Math x[width], total = Math(0), mean = Math(0);
    if (a.residual) {
      for (i64 at = mine; at < a.hidden; at += step) {
        Math y[width];
        load_values(x, a.input, a.input_type, begin + at);
        load_values(y, a.residual, a.input_type, begin + at);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] += y[i];
        store_values(a.sum, a.input_type, begin + at, x);
      }
    }
    if constexpr (centered) {
      for (i64 at = mine; at < a.hidden; at += step) {
        load_values(x, input, a.input_type, begin + at);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) total += x[i];
      }
      mean = block_reduce<Sum>(total) / (Math)a.hidden;
      total = Math(0);
    }
    for (i64 at = mine; at < a.hidden; at += step) {
      load_values(x, input, a.input_type, begin + at);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) total = fma(x[i] - mean, x[i] - mean, total);
    }
    const Math rstd = Math(1) / sqrt(block_reduce<Sum>(total) / (Math)a.hidden + (Math)a.eps);
    if (thread_x() == 0) {
      if (centered) reinterpret_cast<Math*>(a.mean)[row] = mean;
      reinterpret_cast<Math*>(a.rstd)[row] = rstd;
    }
    for (i64 at = mine; at < a.hidden; at += step) {
      Math w[width], b[width];
      load_values(x, input, a.input_type, begin + at);
      load_weight(w, a.weight, a.weight_type, at, Math(1));
      load_weight(b, centered ? a.bias : nullptr, a.weight_type, at, Math(0));
      if constexpr (Output::as_codes) out.centre(w);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = fma((x[i] - mean) * rstd, w[i], b[i]);
      if constexpr (Output::as_codes) out.store(begin + at, x);
      else store_values(a.output, a.output_type, begin + at, x);
    }
  }
  if constexpr (Output::as_codes) return out.largest;
}

// Normalised values, gradients and weights of [at, at + width) of a row.
template <bool centered, class Math, int width>
GPU_FN void load_gradient(const NormBackward& a, const Normalized<centered, Math>& normalized, i64 begin, i64 at,
                          Math (&x)[width], Math (&dy)[width], Math (&w)[width]) {
  Math b[width];
  load_values(x, a.saved, a.from_output ? a.output_type : a.input_type, begin + at);
  load_values(dy, a.grad_output, a.output_type, begin + at);
  load_weight(w, a.weight, a.weight_type, at, Math(1));
  load_weight(b, centered && a.from_output ? a.bias : nullptr, a.weight_type, at, Math(0));
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = normalized(x[i], w[i], b[i]);
}

// The gradient of the input alone.
template <bool centered, class Math, int width> GPU_FN void norm_backward_long(const NormBackward& a) {
  const i64 step = (i64)block_size_x() * width, mine = (i64)thread_x() * width;
  for (i64 row = block_x(); row < a.rows; row += grid_x()) {
    const i64 begin = row * a.hidden;
    const Normalized<centered, Math> normalized{load_statistic<Math>(a.mean, row), load_statistic<Math>(a.rstd, row),
                                                (Math)a.eps, a.from_output != 0};
    Math x[width], dy[width], w[width], along_x = Math(0), along_one = Math(0);
    for (i64 at = mine; at < a.hidden; at += step) {
      load_gradient(a, normalized, begin, at, x, dy, w);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        const Math g = dy[i] * w[i];
        along_x = fma(x[i], g, along_x);
        along_one += g;
      }
    }
    along_x = block_reduce<Sum>(along_x) / (Math)a.hidden;
    along_one = centered ? block_reduce<Sum>(along_one) / (Math)a.hidden : Math(0);
    for (i64 at = mine; at < a.hidden; at += step) {
      load_gradient(a, normalized, begin, at, x, dy, w);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i)
        x[i] = fma(-x[i], along_x, fma(dy[i], w[i], -along_one)) * normalized.rstd;
      if (a.grad_sum) {
        Math more[width];
        load_values(more, a.grad_sum, a.input_type, begin + at);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] += more[i];
      }
      store_values(a.grad_input, a.input_type, begin + at, x);
    }
  }
}
#endif
}  // namespace gpu
