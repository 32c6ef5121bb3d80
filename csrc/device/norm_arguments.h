// Arguments of the norms' kernels (norm.h), by value: the bindings fill them in.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 norm_threads = 512;
constexpr u32 norm_few_columns = 8;  // of a block of the `few` kernels that makes the weights' gradients

struct NormForward {
  const u8* input;     // [rows][hidden]
  const u8* residual;  // as input, added to it first; or null
  u8* sum;             // as input: input + residual, if there is one
  const u8* weight;    // [hidden]; or null
  const u8* bias;      // likewise; layer norm alone
  u8* output;          // [rows][hidden]
  u8* mean;            // [rows], float or double as the arithmetic; layer norm alone
  u8* rstd;            // likewise: 1 / the standard deviation, or 1 / the root mean square
  i64 rows, hidden;
  double eps;
  i32 input_type, output_type, weight_type;
  i32 warp_rows;       // of the `rows` kernels. 1: a row is one warp's, 0: one block's
  i32 stages;          // likewise: how many rows of a warp's part are in shared memory at once
  i32 constant_bytes;  // likewise: of shared memory before those rows, for weights
};

struct NormBackward {
  const u8* grad_output;  // [rows][hidden], output_type
  const u8* saved;        // the input (with its residual), or with from_output the output
  const u8* grad_sum;     // as the input: added to its gradient; or null
  const u8* mean;         // of the forward; null for RMS norm, and with from_output
  const u8* rstd;
  const u8* weight;  // or null
  const u8* bias;    // with from_output
  u8* grad_input;    // [rows][hidden], input_type
  u8* grad_weight;   // [hidden], weight_type; null: not wanted, nor is that of the bias
  u8* grad_bias;     // layer norm alone; or null
  u8* partials;      // [2][parts][norm_partials_pitch(hidden)], float or double
  i64 rows, hidden;
  double eps;  // weights nearer to 0 count as eps where the output is divided by them
  i32 input_type, output_type, weight_type;
  i32 from_output;
  i32 warp_rows;  // as above
  i32 stages;
  i64 parts;
  i32 constant_bytes;
  i32 column_threads;  // where columns are summed over rows: threads side by side; the block's others take other rows
  i32 column_blocks;   // of the `columns` kernel: blocks side by side
  i32 row_blocks;      // of the `few` kernels: the blocks after these make the weights' gradients
};
}  // namespace gpu
