// Casts to FP8 with a scale for each block of 1x128 or 128x128 elements: arguments of the kernels and the CPU variant,
// by value.
//
//   scale = current_scale of the block's largest |x| (fp8_tile.h);  code = fp8(x * scale)
// The transpose of a 1x128 cast is the cast of the transpose: its blocks go down 128 rows, with scales of their own.
#pragma once
#include "fp8_tile.h"

namespace gpu {
constexpr int fp8_block = 128;
static_assert(fp8_block == fp8_tile_rows, "a tile has blocks of its own");

struct Fp8QuantizeBlocks {
  const u8* input;          // [rows][columns]
  u8* by_row;               // [rows][columns]; or null
  u8* by_column;            // [columns][rows]; or null
  float* scale_inv;         // of by_row: 128x128 [row blocks][column blocks], 1x128 [column blocks][rows]
  float* scale_inv_turned;  // of by_column, 1x128 alone: [row blocks][columns]
  i64 rows, columns;
  float epsilon;
  i32 square;        // 1: blocks of 128x128, 0: of 1x128
  i32 power_of_two;  // 1: scales are rounded down to one
  i32 type;          // of input
  i32 format;
  i32 vectors;        // 1: rows of the input and of by_row begin at multiples of 16 and 8 bytes
  i32 wide_columns;   // 1: the rows of by_column begin at a multiple of 16 bytes
  u32 column_blocks;  // blocks side by side
};
}  // namespace gpu
