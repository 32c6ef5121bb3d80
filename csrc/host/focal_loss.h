// Launching the sigmoid focal loss, and its CPU variant: csrc/device/focal_loss.h says what it computes.
#pragma once
#include "apex.h"
#include "device/focal_loss_arguments.h"

extern "C" APEX_EXPORT int32_t apex_focal_loss_forward(const apex_place* place, const gpu::FocalLoss* arguments,
                                                       const apex_workspace* workspace);
extern "C" APEX_EXPORT int32_t apex_focal_loss_backward(const apex_place* place, const gpu::FocalLoss* arguments);

namespace apex {
void focal_loss_forward_cpu(const gpu::FocalLoss& a);
void focal_loss_backward_cpu(const gpu::FocalLoss& a);
}  // namespace apex
