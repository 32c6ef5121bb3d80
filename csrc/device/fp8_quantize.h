// A cast to FP8: arguments of the kernels and the CPU variant, by value, and what is cast.
//
//   code = fp8(y * scale);  amax = max(amax, max |y|)
// y is the input, or an activation of it, or the gradient of what an activation was given (`before`), as
// bias_activation.h has them. The codes are written as rows, as columns (the transpose), or both, in one pass; with
// them the sums of y's columns, a bias's gradient.
//
// Without a scale it is made of y's own largest magnitude, current_scale of fp8_tile.h, in a pass of its own before.
#pragma once
#include "bias_activation.h"
#include "fp8_tile.h"

namespace gpu {
enum : i32 { fp8_of_input, fp8_of_activation, fp8_of_gradient };

struct Fp8Quantize {
  const u8* input;     // [rows][columns]; of a gated activation [rows][2 * columns]
  const u8* before;    // of a gradient: [rows][columns], gated twice as wide, as are y and its sums; or null
  const float* scale;  // or null: `scale_inv` is given, and the scale is made
  float* amax;         // or null
  u8* by_row;          // [rows][width of y]; or null
  u8* by_column;       // [width of y][rows]; or null
  u8* partials;        // float [parts][width of y], the sums of each 128 rows; or null
  u8* grad_bias;       // [width of y], of the input's type; or null
  float* made_scale;   // where the scale is made: it
  float* scale_inv;    // and 1 / it
  u32* counters;       // [2], 0 before and after: the largest magnitude, blocks that are done; null: none is made here
  i64 rows, columns;
  double slope, cubic;
  i32 function;
  i32 source;  // fp8_of_input, ...
  i32 gated;
  i32 type;  // of input, before and grad_bias
  i32 format;
  float epsilon;      // of a scale that is made: the least magnitude
  i32 power_of_two;   // it is rounded down to one
  i32 wide_columns;   // 1: the rows of by_column begin at a multiple of 16 bytes
  u32 column_blocks;  // blocks side by side
};

// y of one element: of an activation, and of the gradient g of its result; `second` is the gate, `of_second` its
// gradient.
template <bool gated, class Function> GPU_FN float activated(const Function& f, float first, float second) {
  const float y = f(first);
  return gated ? y * second : y;
}
template <bool gated, class Function>
GPU_FN float activation_gradient(const Function& f, float g, float first, float second, float& of_second) {
  float slope;
  const float y = f.template value<true>(first, slope);
  of_second = g * y;
  return gated ? g * second * slope : g * slope;
}
}  // namespace gpu
