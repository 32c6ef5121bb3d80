// Launching group norm, and its CPU variant: csrc/device/group_norm.h says what it computes.
#pragma once
#include "apex.h"
#include "device/group_norm_arguments.h"

namespace apex {
// What prepare decided.
struct GroupNormPlan {
  int32_t variant;
  bool in_one_launch;   // an image's groups stay in shared memory
  int32_t kernel;       // of the tables
  int32_t sums_kernel;  // likewise, of the backward's sums, channels first
  uint32_t threads, sums_threads;
  int64_t blocks, sums_blocks;               // of the launch that writes, and of the one before
  int64_t shared;                            // bytes
  int64_t group_partials, channel_partials;  // floats (or doubles) that the arguments must point to
};

void group_norm_forward_cpu(const gpu::GroupNorm& a);
void group_norm_backward_cpu(const gpu::GroupNorm& a);
}  // namespace apex

/* Fills in the geometry. `grad_weight` or `grad_bias` of the backward must be set before if they are wanted. */
extern "C" APEX_EXPORT int32_t apex_group_norm_prepare(const apex_place* place, gpu::GroupNorm* arguments,
                                                       int32_t backward, apex::GroupNormPlan* plan);
extern "C" APEX_EXPORT int32_t apex_group_norm_forward(const apex_place* place, const gpu::GroupNorm* arguments,
                                                       const apex::GroupNormPlan* plan);
extern "C" APEX_EXPORT int32_t apex_group_norm_backward(const apex_place* place, const gpu::GroupNorm* arguments,
                                                        const apex::GroupNormPlan* plan);
/* For benchmarks: 1: in one launch wherever an image's groups fit, 2: in two, 0: as the library chooses. */
extern "C" APEX_EXPORT void apex_set_group_norm_launches(int32_t launches);
