// Launching group norm, and its CPU variant: csrc/device/group_norm.h says what it computes.
#pragma once
#include "apex.h"
#include "device/group_norm_arguments.h"

namespace apex {
void group_norm_forward_cpu(const gpu::GroupNorm& a);
void group_norm_backward_cpu(const gpu::GroupNorm& a);
}  // namespace apex

extern "C" APEX_EXPORT int32_t apex_group_norm_forward(const apex_place* place, const gpu::GroupNorm* arguments,
                                                       const apex_workspace* workspace);
/* `grad_weight` and `grad_bias`: null where not wanted. */
extern "C" APEX_EXPORT int32_t apex_group_norm_backward(const apex_place* place, const gpu::GroupNorm* arguments,
                                                        const apex_workspace* workspace);
/* For benchmarks: 1: in one launch wherever an image's groups fit, 2: in two, 0: as the library chooses. */
extern "C" APEX_EXPORT void apex_set_group_norm_launches(int32_t launches);
