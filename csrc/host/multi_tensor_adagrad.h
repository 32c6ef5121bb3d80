#pragma once
#include "device/multi_tensor_adagrad.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, sums of squares. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_adagrad(const apex_place* place, const apex_tensor_lists* lists,
                                                         const gpu::AdagradArguments* arguments);
