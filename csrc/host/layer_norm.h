#pragma once
#include "apex.h"
#include "norm.h"

/* prepare and backward: as prepare_norm_backward and run_norm_backward of norm.h. */
extern "C" APEX_EXPORT int32_t apex_layer_norm_forward(const apex_place* place, const gpu::NormForward* arguments);
extern "C" APEX_EXPORT int32_t apex_layer_norm_prepare(const apex_place* place, gpu::NormBackward* arguments,
                                                       apex::NormPlan* plan);
extern "C" APEX_EXPORT int32_t apex_layer_norm_backward(const apex_place* place, const gpu::NormBackward* arguments,
                                                        const apex::NormPlan* plan);
