#pragma once
#include "device/multi_tensor_axpby.h"
#include "host/multi_tensor.h"

/* Lists: x, y, outputs. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_axpby(const apex_place* place, const apex_tensor_lists* lists,
                                                       const gpu::AxpbyArguments* arguments);
