// The kernels of a norm to FP8: as those of layer_norm and rms_norm, of one element type.
#pragma once
#include "norm_long.h"
#include "norm_rows.h"

#define FP8_NORM_KERNEL(name, ...)                                                                              \
  extern "C" GPU_KERNEL(gpu::norm_threads, 1) void name(gpu::NormForward arguments, gpu::Fp8Norm fp8) {         \
    gpu::await_previous_kernel();                                                                               \
    gpu::record_amax(fp8.amax, gpu::__VA_ARGS__, gpu::NormCodes > (arguments, gpu::NormCodes(arguments, fp8))); \
  }                                                                                                             \
  GPU_REGISTER(name)
#define FP8_NORM_ROWS(op, centered, name, type, width, vectors) \
  FP8_NORM_KERNEL(op##_forward_##name, norm_forward_rows < centered, type, width, vectors)
#define FP8_NORM_KERNELS(op, centered)                                        \
  FP8_NORM_ROWS(op, centered, bf16x2, gpu::type_bf16, 8, 2)                   \
  FP8_NORM_ROWS(op, centered, bf16x3, gpu::type_bf16, 8, 3)                   \
  FP8_NORM_ROWS(op, centered, bf16x4, gpu::type_bf16, 8, 4)                   \
  FP8_NORM_ROWS(op, centered, f16x2, gpu::type_f16, 8, 2)                     \
  FP8_NORM_ROWS(op, centered, f16x3, gpu::type_f16, 8, 3)                     \
  FP8_NORM_ROWS(op, centered, f16x4, gpu::type_f16, 8, 4)                     \
  FP8_NORM_ROWS(op, centered, f32x4, gpu::type_f32, 4, 4)                     \
  FP8_NORM_ROWS(op, centered, f32x8, gpu::type_f32, 4, 8)                     \
  FP8_NORM_KERNEL(op##_forward_long8, norm_forward_long < centered, float, 8) \
  FP8_NORM_KERNEL(op##_forward_long1, norm_forward_long < centered, float, 1)
