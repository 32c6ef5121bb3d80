// Launching softmax cross entropy, and its CPU variant: csrc/device/xentropy.h says what it computes.
#pragma once
#include "apex.h"
#include "device/xentropy_arguments.h"

extern "C" APEX_EXPORT int32_t apex_xentropy_forward(const apex_place* place, const gpu::XentropyForward* arguments,
                                                     const apex_workspace* workspace);
extern "C" APEX_EXPORT int32_t apex_xentropy_backward(const apex_place* place, const gpu::XentropyBackward* arguments);

namespace apex {
// The same where nobody may be told of a wrong label, by XLA: it gives nan on a CPU, too.
int32_t run_xentropy_forward(const apex_place& place, gpu::XentropyForward a, const apex_workspace* workspace);
int32_t run_xentropy_backward(const apex_place& place, gpu::XentropyBackward a);

void xentropy_forward_cpu(const gpu::XentropyForward& a);
void xentropy_backward_cpu(const gpu::XentropyBackward& a);
}  // namespace apex
