#pragma once
#include "device/multi_tensor_adam.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, exp_avgs, exp_avg_sqs[, lower-precision model copies]. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_adam(const apex_place* place, const apex_tensor_lists* lists,
                                                      const gpu::AdamArguments* arguments,
                                                      const apex_workspace* workspace);
