// Launching softmax cross entropy, and its CPU variant: csrc/device/xentropy.h says what it computes.
#pragma once
#include "apex.h"
#include "device/xentropy_arguments.h"

/* Fills in what the launch needs: where `splits` is more than 1 afterwards, `partials` must hold 3 * rows * splits
 * floats (doubles of doubles) before apex_xentropy_forward, which `variant` goes on to: the choice may change. */
extern "C" APEX_EXPORT int32_t apex_xentropy_prepare(const apex_place* place, gpu::XentropyForward* arguments,
                                                     int32_t* variant);
extern "C" APEX_EXPORT int32_t apex_xentropy_forward(const apex_place* place, const gpu::XentropyForward* arguments,
                                                     int32_t variant);
extern "C" APEX_EXPORT int32_t apex_xentropy_backward(const apex_place* place, const gpu::XentropyBackward* arguments);

namespace apex {
void xentropy_forward_cpu(const gpu::XentropyForward& a);
void xentropy_backward_cpu(const gpu::XentropyBackward& a);
}  // namespace apex
