// Casts of many matrices to FP8 in one launch, each with a scale of its own: arguments of the kernels, by value.
#pragma once
#include "fp8_quantize.h"

namespace gpu {
constexpr int fp8_multi_most = 64;  // matrices of a launch: kernels take 4 KB of arguments

struct Fp8MultiQuantize {
  u64 input[64];      // [rows][columns] of `type`
  u64 by_row[64];     // [rows][columns]; or 0
  u64 by_column[64];  // [columns][rows]; or 0
  i64 rows[64], columns[64];
  u32 first_block[64];  // of each: blocks before it
  const float* scale;   // [count]
  float* amax;          // [count]; or null
  i32 count;
  i32 type;
  i32 format;
  i32 reserved;
};
static_assert(sizeof(Fp8MultiQuantize) <= 4096, "what a kernel is given");
}  // namespace gpu
