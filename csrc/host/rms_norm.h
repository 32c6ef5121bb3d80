#pragma once
#include "apex.h"
#include "norm.h"

extern "C" APEX_EXPORT int32_t apex_rms_norm_forward(const apex_place* place, const gpu::NormForward* arguments);
extern "C" APEX_EXPORT int32_t apex_rms_norm_backward(const apex_place* place, const gpu::NormBackward* arguments,
                                                      const apex_workspace* workspace);
