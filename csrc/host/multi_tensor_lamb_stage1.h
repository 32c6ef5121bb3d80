#pragma once
#include "device/multi_tensor_lamb_stage1.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, exp_avgs, exp_avg_sqs, updates. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_lamb_stage1(const apex_place* place, const apex_tensor_lists* lists,
                                                             const gpu::LambArguments* arguments);
