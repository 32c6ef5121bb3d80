// Layer norm and RMS norm over the rows of a matrix, forward and backward, with or without a residual that is added
// first. Layer norm is `centered`.
//
// Rows whose vectors fit in the registers of one warp or one block take the `rows` kernels (norm_rows.h); longer rows,
// and rows that no vector fits, the `long` kernels (norm_long.h). Few rows take the `few` kernels, a block each
// (norm_few.h). Where shared memory is as large as a Hopper's, layer norm of a few lengths, in halves, has kernels of
// its own (norm_teams.h). Sums are float (double for double tensors) in a fixed order; weight gradients are partial
// sums, one a block, that `finish` adds up (norm_partials.h), so results are the same from run to run.
#pragma once
#include "norm_few.h"
#include "norm_long.h"
#include "norm_partials.h"
#include "norm_rows.h"

// Kernels of rows in registers, V(name, element type of input and output, elements of a vector, vectors a thread); and
// of long rows, V(name, arithmetic, elements of a vector).
#define NORM_ROWS(V)              \
  V(bf16x2, gpu::type_bf16, 8, 2) \
  V(bf16x3, gpu::type_bf16, 8, 3) \
  V(bf16x4, gpu::type_bf16, 8, 4) \
  V(f16x2, gpu::type_f16, 8, 2)   \
  V(f16x3, gpu::type_f16, 8, 3)   \
  V(f16x4, gpu::type_f16, 8, 4)   \
  V(f32x4, gpu::type_f32, 4, 4)   \
  V(f32x8, gpu::type_f32, 4, 8)   \
  V(anyx4, gpu::any_type, 4, 4)   \
  V(anyx8, gpu::any_type, 4, 8)
#define NORM_LONG(V) V(long8, float, 8) V(long1, float, 1) V(long_f64, double, 1)
// Of few rows, V(name, element type of input and output, elements of a vector).
#define NORM_FEW(V) \
  V(bf16, gpu::type_bf16, 8) V(f16, gpu::type_f16, 8) V(f32, gpu::type_f32, 4) V(any, gpu::any_type, 4)
#define NORM_MATH(V) V(, float) V(_f64, double)

#define NORM_KERNEL(name, Arguments, ...)                                           \
  extern "C" GPU_KERNEL(gpu::norm_threads, 1) void name(gpu::Arguments arguments) { \
    gpu::await_previous_kernel();                                                   \
    __VA_ARGS__(arguments);                                                         \
  }                                                                                 \
  GPU_REGISTER(name)

// All kernels of an op.
#define NORM_ROWS_KERNELS(op, centered, name, types, width, vectors)                                               \
  NORM_KERNEL(op##_forward_##name, NormForward, gpu::norm_forward_rows<centered, types, width, vectors>)           \
  NORM_KERNEL(op##_backward_##name, NormBackward, gpu::norm_backward_rows<centered, false, types, width, vectors>) \
  NORM_KERNEL(op##_backward_of_output_##name, NormBackward,                                                        \
              gpu::norm_backward_rows<centered, true, types, width, vectors>)
#define NORM_LONG_KERNELS(op, centered, name, Math, width)                                     \
  NORM_KERNEL(op##_forward_##name, NormForward, gpu::norm_forward_long<centered, Math, width>) \
  NORM_KERNEL(op##_backward_##name, NormBackward, gpu::norm_backward_long<centered, Math, width>)
#define NORM_FEW_KERNELS(op, centered, name, types, width)                                         \
  NORM_KERNEL(op##_forward_few_##name, NormForward, gpu::norm_forward_few<centered, types, width>) \
  NORM_KERNEL(op##_backward_few_##name, NormBackward, gpu::norm_backward_few<centered, types, width>)
#define NORM_MATH_KERNELS(op, centered, name, Math)                                         \
  NORM_KERNEL(op##_columns##name, NormBackward, gpu::norm_backward_columns<centered, Math>) \
  NORM_KERNEL(op##_finish##name, NormBackward, gpu::norm_backward_finish<centered, Math>)
