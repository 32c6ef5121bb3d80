// Launching softmax cross entropy, and its CPU variant: csrc/device/xentropy.h says what it computes.
#pragma once
#include "apex.h"
#include "device/xentropy_arguments.h"

extern "C" APEX_EXPORT int32_t apex_xentropy_forward(const apex_place* place, const gpu::XentropyForward* arguments,
                                                     const apex_workspace* workspace);
extern "C" APEX_EXPORT int32_t apex_xentropy_backward(const apex_place* place, const gpu::XentropyBackward* arguments);

namespace apex {
void xentropy_forward_cpu(const gpu::XentropyForward& a);
void xentropy_backward_cpu(const gpu::XentropyBackward& a);
}  // namespace apex
