#pragma once
#include "apex.h"
#include "device/bias_activation.h"

extern "C" APEX_EXPORT int32_t apex_bias_activation_forward(const apex_place* place, const gpu::BiasActivation* arguments);
/* Fills in what the backward's launch needs, `parts` among it: `partials` must hold parts * columns floats (or doubles)
 * before the backward, unless grad_bias is null. */
extern "C" APEX_EXPORT int32_t apex_bias_activation_prepare(const apex_place* place, gpu::BiasActivation* arguments);
extern "C" APEX_EXPORT int32_t apex_bias_activation_backward(const apex_place* place, const gpu::BiasActivation* arguments);
