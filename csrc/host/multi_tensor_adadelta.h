#pragma once
#include "device/multi_tensor_adadelta.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, averages of squared gradients, averages of squared updates. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_adadelta(const apex_place* place, const apex_tensor_lists* lists,
                                                          const gpu::AdadeltaArguments* arguments);
