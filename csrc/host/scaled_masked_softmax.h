#pragma once
#include "apex.h"
#include "device/scaled_masked_softmax.h"

/* Tensors, shapes, strides, `type` and `causal` are the caller's; the rest is filled in here. A row has fewer than 2^32
 * elements, or the answer is APEX_USE_REFERENCE. */
extern "C" APEX_EXPORT int32_t apex_scaled_masked_softmax_forward(const apex_place* place,
                                                                  const gpu::SoftmaxForward* arguments, double scale);
extern "C" APEX_EXPORT int32_t apex_scaled_masked_softmax_backward(const apex_place* place,
                                                                   const gpu::SoftmaxBackward* arguments, double scale);

namespace apex {
void scaled_masked_softmax_forward_cpu(const gpu::SoftmaxForward& a);
void scaled_masked_softmax_backward_cpu(const gpu::SoftmaxBackward& a);
}  // namespace apex
