#pragma once
#include "device/multi_tensor_amsgrad.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, exp_avgs, exp_avg_sqs, max_exp_avg_sqs. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_amsgrad(const apex_place* place, const apex_tensor_lists* lists,
                                                         const gpu::AdamArguments* arguments,
                                                         const apex_workspace* workspace);
