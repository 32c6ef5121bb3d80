// Launching the norms (layer_norm, rms_norm) and their CPU variants: csrc/device/norm.h says how, norm_arguments.h what
// they compute.
#pragma once
#include <atomic>

#include "apex.h"
#include "device/norm_codes.h"

namespace apex {
// The `teams` kernels of one length of row (norm_layout.h), of bfloat16 and float16.
struct NormTeams {
  int64_t hidden, threads, teams, stages;
  apex_kernel kernels[2];
};

// One op's kernels, in the order of NORM_ROWS, NORM_LONG, NORM_MATH and NORM_FEW.
struct NormOp {
  static constexpr int rows_kernels = 10, most_teams = 5;
  const char* unit;
  bool centered;
  apex_kernel forward_rows[rows_kernels], backward_rows[rows_kernels], backward_of_output_rows[rows_kernels];
  apex_kernel forward_long[3], backward_long[3], columns[2], finish[2];
  apex_kernel forward_few[4], backward_few[4];
  // How many blocks of a `rows` kernel fit on a multiprocessor: the last answer of the driver, with what was asked.
  std::atomic<uint64_t> forward_fits[rows_kernels]{}, backward_fits[rows_kernels]{},
      backward_of_output_fits[rows_kernels]{};
  NormTeams forward_teams[most_teams]{}, backward_teams[most_teams]{};
  apex_kernel forward_held[2]{};  // of bfloat16 and float16, of an RMS norm to FP8
  std::atomic<uint64_t> held_fits[2]{};
};

// fp8: of an op whose output is FP8; else null.
int32_t run_norm_forward(NormOp& op, const apex_place* place, gpu::NormForward a, const gpu::Fp8Norm* fp8 = nullptr);
int32_t run_norm_backward(NormOp& op, const apex_place* place, gpu::NormBackward a, const apex_workspace* workspace);

void norm_forward_cpu(bool centered, const gpu::NormForward& a, const gpu::Fp8Norm* fp8);
void norm_backward_cpu(bool centered, const gpu::NormBackward& a);
}  // namespace apex

// For benchmarks: how the next launches of the `rows` kernels share the work. 0: as the library chooses.
struct apex_norm_layout {
  int32_t vectors;    // a thread
  int32_t row_teams;  // 1: a row is one warp's, 2: one block's
  int32_t threads;    // of a block whose warps have rows of their own
  int32_t blocks;     // at most, on a multiprocessor
  int32_t stages;     // rows in shared memory at once
};
// `layout` null: as the library chooses, as also where no kernel fits what is asked.
extern "C" APEX_EXPORT void apex_set_norm_layout(int32_t backward, const apex_norm_layout* layout);

#define APEX_NORM_KERNEL(op, part, name) {#op, #op "_" #part #name, 0, 1}
#define APEX_NORM_ROWS(op, part)                                                                               \
  APEX_NORM_KERNEL(op, part, bf16x2), APEX_NORM_KERNEL(op, part, bf16x3), APEX_NORM_KERNEL(op, part, bf16x4),  \
      APEX_NORM_KERNEL(op, part, f16x2), APEX_NORM_KERNEL(op, part, f16x3), APEX_NORM_KERNEL(op, part, f16x4), \
      APEX_NORM_KERNEL(op, part, f32x4), APEX_NORM_KERNEL(op, part, f32x8), APEX_NORM_KERNEL(op, part, anyx4), \
      APEX_NORM_KERNEL(op, part, anyx8)
#define APEX_NORM_FEW(op, part)                                                  \
  APEX_NORM_KERNEL(op, part##few_, bf16), APEX_NORM_KERNEL(op, part##few_, f16), \
      APEX_NORM_KERNEL(op, part##few_, f32), APEX_NORM_KERNEL(op, part##few_, any)
// The table of an op whose output is FP8: the forward's kernels alone; last, its two `held` kernels, if it has them.
#define APEX_FP8_NORM_OP(op, centered, ...)                                                                           \
  static apex::NormOp kernels = {                                                                                     \
      #op, centered,   {APEX_NORM_ROWS(op, forward_)},                                                                \
      {},  {},         {APEX_NORM_KERNEL(op, forward_, long8), APEX_NORM_KERNEL(op, forward_, long1), {}},            \
      {},  {},         {},                                                                                            \
      {},  {},         {},                                                                                            \
      {},  {},         {},                                                                                            \
      {},  __VA_ARGS__};                                                                                              \
  extern "C" int32_t apex_##op(const apex_place* place, const gpu::NormForward* arguments, const gpu::Fp8Norm* fp8) { \
    if (const int32_t status = apex::check_fp8(#op, arguments->input_type, fp8->format, fp8->scale, "scale"))         \
      return status;                                                                                                  \
    return apex::run_norm_forward(kernels, place, *arguments, fp8);                                                   \
  }
// The one table and the C functions of an op; last, its two lists of `teams` kernels, if it has them.
#define APEX_NORM_OP(op, centered, ...)                                                                           \
  static apex::NormOp kernels = {#op,                                                                             \
                                 centered,                                                                        \
                                 {APEX_NORM_ROWS(op, forward_)},                                                  \
                                 {APEX_NORM_ROWS(op, backward_)},                                                 \
                                 {APEX_NORM_ROWS(op, backward_of_output_)},                                       \
                                 {APEX_NORM_KERNEL(op, forward_, long8), APEX_NORM_KERNEL(op, forward_, long1),   \
                                  APEX_NORM_KERNEL(op, forward_, long_f64)},                                      \
                                 {APEX_NORM_KERNEL(op, backward_, long8), APEX_NORM_KERNEL(op, backward_, long1), \
                                  APEX_NORM_KERNEL(op, backward_, long_f64)},                                     \
                                 {APEX_NORM_KERNEL(op, columns, ), APEX_NORM_KERNEL(op, columns, _f64)},          \
                                 {APEX_NORM_KERNEL(op, finish, ), APEX_NORM_KERNEL(op, finish, _f64)},            \
                                 {APEX_NORM_FEW(op, forward_)},                                                   \
                                 {APEX_NORM_FEW(op, backward_)},                                                  \
                                 {},                                                                              \
                                 {},                                                                              \
                                 {},                                                                              \
                                 __VA_ARGS__};                                                                    \
  extern "C" int32_t apex_##op##_forward(const apex_place* place, const gpu::NormForward* arguments) {            \
    return apex::run_norm_forward(kernels, place, *arguments);                                                    \
  }                                                                                                               \
  extern "C" int32_t apex_##op##_backward(const apex_place* place, const gpu::NormBackward* arguments,            \
                                          const apex_workspace* workspace) {                                      \
    return apex::run_norm_backward(kernels, place, *arguments, workspace);                                        \
  }
