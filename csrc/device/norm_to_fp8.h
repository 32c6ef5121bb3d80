// The kernels of a norm to FP8: as those of layer_norm and rms_norm, of one element type.
#pragma once
#include "norm_long.h"
#include "norm_rows.h"

// `codes`: NormCodes<false>, or <true> where the format is one of OCP's.
#define FP8_NORM_KERNEL(name, blocks, codes, ...)                                                            \
  extern "C" GPU_KERNEL(gpu::norm_threads, blocks) void name(gpu::NormForward arguments, gpu::Fp8Norm fp8) { \
    gpu::await_previous_kernel();                                                                            \
    gpu::record_amax(fp8.amax, gpu::__VA_ARGS__, gpu::codes > (arguments, gpu::codes(arguments, fp8)));      \
  }                                                                                                          \
  GPU_REGISTER(name)
#define FP8_NORM_ROWS(op, centered, name, type, width, vectors) \
  FP8_NORM_KERNEL(op##_forward_##name, 1, NormCodes<false>, norm_forward_rows < centered, type, width, vectors)
#define FP8_NORM_KERNELS(op, centered)                                                             \
  FP8_NORM_ROWS(op, centered, bf16x2, gpu::type_bf16, 8, 2)                                        \
  FP8_NORM_ROWS(op, centered, bf16x3, gpu::type_bf16, 8, 3)                                        \
  FP8_NORM_ROWS(op, centered, bf16x4, gpu::type_bf16, 8, 4)                                        \
  FP8_NORM_ROWS(op, centered, f16x2, gpu::type_f16, 8, 2)                                          \
  FP8_NORM_ROWS(op, centered, f16x3, gpu::type_f16, 8, 3)                                          \
  FP8_NORM_ROWS(op, centered, f16x4, gpu::type_f16, 8, 4)                                          \
  FP8_NORM_ROWS(op, centered, f32x4, gpu::type_f32, 4, 4)                                          \
  FP8_NORM_ROWS(op, centered, f32x8, gpu::type_f32, 4, 8)                                          \
  FP8_NORM_KERNEL(op##_forward_long8, 1, NormCodes<false>, norm_forward_long < centered, float, 8) \
  FP8_NORM_KERNEL(op##_forward_long1, 1, NormCodes<false>, norm_forward_long < centered, float, 1)
