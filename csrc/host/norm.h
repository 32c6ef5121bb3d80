// Launching the norms (layer_norm, rms_norm) and their CPU variants: csrc/device/norm.h says how, norm_arguments.h what they compute.
#pragma once
#include "apex.h"
#include "device/norm_arguments.h"

namespace apex {
// One op's kernels, in the order of NORM_ROWS, NORM_LONG and NORM_MATH.
struct NormOp {
  const char* unit;
  bool centered;
  apex_kernel forward_rows[14], backward_rows[14], forward_long[3], backward_long[3], columns[2], finish[2];
};

int32_t run_norm_forward(NormOp& op, const apex_place* place, gpu::NormForward a);
// Fills in what the launch needs, `parts` among it: `partials` must hold 2 * parts * hidden floats (or doubles) before
// run_norm_backward, unless grad_weight is null.
int32_t prepare_norm_backward(NormOp& op, const apex_place* place, gpu::NormBackward* a);
int32_t run_norm_backward(NormOp& op, const apex_place* place, const gpu::NormBackward& a);

void norm_forward_cpu(bool centered, const gpu::NormForward& a);
void norm_backward_cpu(bool centered, const gpu::NormBackward& a);
}  // namespace apex

#define APEX_NORM_KERNEL(op, part, name) {#op, #op "_" #part #name, 0}
#define APEX_NORM_ROWS(op, part)                                                                             \
  APEX_NORM_KERNEL(op, part, bf16x1), APEX_NORM_KERNEL(op, part, bf16x2), APEX_NORM_KERNEL(op, part, bf16x3), \
      APEX_NORM_KERNEL(op, part, bf16x4), \
      APEX_NORM_KERNEL(op, part, f16x1), APEX_NORM_KERNEL(op, part, f16x2), APEX_NORM_KERNEL(op, part, f16x3), \
      APEX_NORM_KERNEL(op, part, f16x4), \
      APEX_NORM_KERNEL(op, part, f32x2), APEX_NORM_KERNEL(op, part, f32x4), APEX_NORM_KERNEL(op, part, f32x8), \
      APEX_NORM_KERNEL(op, part, anyx2), APEX_NORM_KERNEL(op, part, anyx4), APEX_NORM_KERNEL(op, part, anyx8)
// The one table and the C functions of an op.
#define APEX_NORM_OP(op, centered)                                                                                          \
  static apex::NormOp kernels = {                                                                                           \
      #op, centered,                                                                                                        \
      {APEX_NORM_ROWS(op, forward_)},                                                                                       \
      {APEX_NORM_ROWS(op, backward_)},                                                                                      \
      {APEX_NORM_KERNEL(op, forward_, long8), APEX_NORM_KERNEL(op, forward_, long1), APEX_NORM_KERNEL(op, forward_, long_f64)},    \
      {APEX_NORM_KERNEL(op, backward_, long8), APEX_NORM_KERNEL(op, backward_, long1), APEX_NORM_KERNEL(op, backward_, long_f64)}, \
      {APEX_NORM_KERNEL(op, columns, ), APEX_NORM_KERNEL(op, columns, _f64)},                                               \
      {APEX_NORM_KERNEL(op, finish, ), APEX_NORM_KERNEL(op, finish, _f64)}};                                                \
  extern "C" int32_t apex_##op##_forward(const apex_place* place, const gpu::NormForward* arguments) {                      \
    return apex::run_norm_forward(kernels, place, *arguments);                                                              \
  }                                                                                                                         \
  extern "C" int32_t apex_##op##_prepare(const apex_place* place, gpu::NormBackward* arguments) {                           \
    return apex::prepare_norm_backward(kernels, place, arguments);                                                          \
  }                                                                                                                         \
  extern "C" int32_t apex_##op##_backward(const apex_place* place, const gpu::NormBackward* arguments) {                    \
    return apex::run_norm_backward(kernels, place, *arguments);                                                             \
  }
