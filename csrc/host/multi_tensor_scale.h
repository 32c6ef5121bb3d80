#pragma once
#include "device/multi_tensor_scale.h"
#include "host/multi_tensor.h"

/* Lists: inputs, outputs. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_scale(const apex_place* place, const apex_tensor_lists* lists,
                                                       const gpu::ScaleArguments* arguments);
