#pragma once
#include "device/multi_tensor_lamb.h"
#include "host/multi_tensor.h"

/* Lists: gradients (they receive the updates), parameters, exp_avgs, exp_avg_sqs[, lower-precision model copies].
 * Two launches; two reductions. The caller fills every argument but `totals` and `tensors`. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_lamb(const apex_place* place, const apex_tensor_lists* lists,
                                                      const gpu::LambArguments* arguments);
