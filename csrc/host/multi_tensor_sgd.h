#pragma once
#include "device/multi_tensor_sgd.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters[, momentum buffers[, lower-precision model copies]]. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_sgd(const apex_place* place, const apex_tensor_lists* lists,
                                                     const gpu::SgdArguments* arguments);
