// FP8 back to numbers: arguments of the kernel and the CPU variant, by value. x = code * scale_inv, in float32.
#pragma once
#include "fp8.h"

namespace gpu {
struct Fp8Dequantize {
  const u8* input;
  const float* scale_inv;
  u8* output;
  i64 count;
  i32 type;     // of output
  i32 format;   // of input
  i32 vectors;  // 1: both begin at a multiple of 16 bytes
};
constexpr int fp8_dequantize_threads = 256, fp8_dequantize_width = 16;
}  // namespace gpu
