#pragma once
#include "apex.h"
#include "device/scaled_masked_softmax.h"

/* Tensors, shapes, strides, `type` and `additive` are the caller's; the rest is filled in here. `dropout`: the
 * probability, between 0 and 1; above 0 there are a seed and, in the forward, a tensor for the softmax. In the backward
 * `output` is the softmax. A row has fewer than 2^32 elements, or the answer is APEX_USE_REFERENCE. */
extern "C" APEX_EXPORT int32_t apex_masked_softmax_dropout_forward(const apex_place* place,
                                                                   const gpu::SoftmaxForward* arguments,
                                                                   double dropout);
extern "C" APEX_EXPORT int32_t apex_masked_softmax_dropout_backward(const apex_place* place,
                                                                    const gpu::SoftmaxBackward* arguments,
                                                                    double dropout);
