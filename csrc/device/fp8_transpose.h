// The transpose of an FP8 matrix: arguments of the kernels and the CPU variant, by value. With it the sums of the
// columns of code * scale_inv: a bias's gradient.
#pragma once
#include "fp8_tile.h"

namespace gpu {
struct Fp8Transpose {
  const u8* input;         // [rows][columns]
  const float* scale_inv;  // of the sums; or null
  u8* output;              // [columns][rows]
  u8* partials;            // float [parts][columns], the sums of each 128 rows; or null
  u8* grad_bias;           // [columns], of `type`; or null
  i64 rows, columns;
  i32 type;
  i32 format;
  i32 wide_columns;   // 1: the rows of output begin at a multiple of 16 bytes
  u32 column_blocks;  // blocks side by side
};
}  // namespace gpu
