#pragma once
#include "device/multi_tensor_l2norm.h"
#include "host/multi_tensor.h"

/* List: the tensors to measure. `maximum`: 0 for the L2 norm, 1 for the largest magnitude. One reduction. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_l2norm(const apex_place* place, const apex_tensor_lists* lists,
                                                        const gpu::NormArguments* arguments, int32_t maximum);
