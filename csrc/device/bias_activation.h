// Bias and activation, gated or not: arguments of the kernels and the CPU variant, by value, and the formula.
//
//   u = input + bias;  output = f(u), or gated f(u1) * u2 of the two halves u1, u2 of u's columns
//   f(x) = x * sigmoid(slope * x + cubic * x^3), sigmoid(slope * x), max(x, 0)^2 or max(x, 0)
// SiLU has slope 1, GELU (its tanh form) 2 sqrt(2 / pi) and a cubic of 0.044715 times that, quick GELU 1.702.
#pragma once
#include "exponential.h"
#include "vectors.h"

namespace gpu {
enum : i32 { function_x_sigmoid, function_sigmoid, function_squared_relu, function_relu };
constexpr double gelu_slope = 1.5957691216057308, gelu_cubic = gelu_slope * 0.044715, quick_gelu_slope = 1.702;

struct BiasActivation {
  const u8* input;        // [rows][columns], columns = hidden, gated twice that
  const u8* bias;         // [columns]; or null
  const u8* grad_output;  // [rows][hidden]; of the backward
  u8* output;             // [rows][hidden]; of the backward: the gradient of the input
  u8* grad_bias;          // [columns]; or null
  const u8* scale;        // [hidden], of the bias's type: multiplies the backward's output, not gated; or null
  u8* unscaled;           // what the backward's output is before that, not gated; or null
  u8* partials;           // [parts][columns], float or double: the bias's gradient, a sum of rows for each part
  u32* counters;          // [column_blocks], 0 before and after: the last part adds these up; or null: `finish` does
  i64 rows, hidden;
  double slope, cubic;
  i32 function;
  i32 gated;
  i32 type, bias_type;  // of input, output and gradients; of bias, grad_bias and scale
  i32 lane_threads;     // threads side by side; the block's others take other rows
  u32 column_blocks;    // blocks side by side
  i64 parts;            // blocks on top of each other: each takes every parts-th row, or group of rows
  u32 lane_share;       // of the forward of few rows: 2^32 / lane_threads, rounded up; 0 for 1
  u32 reserved;
};
constexpr int bias_activation_threads = 128;       // of a block
constexpr int bias_activation_most_threads = 256;  // of the backward's, of small tensors
// Of the backward of few rows: a block has some columns of all rows, its threads two of them each and a row.
constexpr int bias_activation_few_threads = 512, bias_activation_few_lanes = 4;
constexpr int bias_activation_few_columns = 2 * bias_activation_few_lanes;

// f and its derivative. exact: exp as exact as Math; else it loses what halves do not see.
template <class Math, bool exact> struct Activation {
  Math slope, cubic;              // of the sigmoid's argument
  Math minus_slope, minus_cubic;  // of exp2's, which is -1 / ln(2) of it
  i32 function;

  template <class Arguments>
  GPU_FN explicit Activation(const Arguments& a)
      : slope((Math)a.slope), cubic((Math)a.cubic), minus_slope((Math)(a.slope * -1.4426950408889634)),
        minus_cubic((Math)(a.cubic * -1.4426950408889634)), function(a.function) {}

  // f(x), and with `derivative` f'(x) beside it. Far below 0, x is held where exp stays in range: f goes to 0 there.
  template <bool derivative> GPU_FN Math value(Math x, Math& slope_there) const {
    if (function >= function_squared_relu) {
      const Math positive = x < Math(0) ? Math(0) : x;  // a nan stays
      const bool squared = function == function_squared_relu;
      slope_there = squared ? positive + positive : x <= Math(0) ? Math(0) : Math(1);
      return squared ? positive * positive : positive;
    }
    const bool alone = function == function_sigmoid;
    constexpr Math most = sizeof(Math) == 8 ? Math(700) : Math(87);
    x = max_or_nan(x, -most);
    const Math near = -max_or_nan(-x, -most), square = near * near;
    if constexpr (exact) {
      // The sigmoid, or what it is short of 1: at most a half, and so are its roundings.
      const Math v = near * fma(cubic, square, slope), e = exp_of_negative(v < Math(0) ? v : -v), sum = Math(1) + e;
      const Math part = fraction(e, sum, reciprocal(sum)), rest = Math(1) - part;
      const bool below = v < Math(0);
      if constexpr (derivative) {
        const Math steep = part * rest;
        const Math whole = fma(near * steep, fma(Math(3) * cubic, square, slope), below ? part : rest);
        slope_there = alone ? steep * slope : whole;
      }
      if (alone) return below ? part : rest;
      return below ? x * part : fma(-near, part, x);
    } else {
      // e^(-v), for a derivative at most e^most.
      const Math t = near * fma(minus_cubic, square, minus_slope);
      const Math e = exp2(derivative ? -max_or_nan(-t, -most * Math(1.4426950408889634)) : t),
                 sigmoid = reciprocal(Math(1) + e);
      if constexpr (derivative) {
        const Math steep = e * sigmoid;
        const Math whole = fma(near * sigmoid, steep * fma(Math(3) * cubic, square, slope), sigmoid);
        slope_there = alone ? steep * sigmoid * slope : whole;
      }
      return alone ? sigmoid : x * sigmoid;
    }
  }
  GPU_FN Math operator()(Math x) const {
    Math unused;
    return value<false>(x, unused);
  }
};

// work(f): the activation; on NVIDIA cards in each of these of a function that the compiler knows: where it is asked at
// every element, none begins before the one before it is done.
template <class Math, bool exact, class Work> GPU_FN void with_activation(const BiasActivation& a, const Work& work) {
  Activation<Math, exact> f(a);
#if !defined(GPU_HIP)
  if (a.function == function_x_sigmoid) {
    f.function = function_x_sigmoid;
    return work(f);
  }
  if (a.function == function_sigmoid) {
    f.function = function_sigmoid;
    return work(f);
  }
  if (a.function == function_squared_relu) {
    f.function = function_squared_relu;
    return work(f);
  }
  f.function = function_relu;
#endif
  work(f);
}
}  // namespace gpu
