#pragma once
#include "device/multi_tensor_reversible_adam.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, exp_avgs, exp_avg_sqs[, copies of the parameters; not to undo]. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_reversible_adam(const apex_place* place,
                                                                 const apex_tensor_lists* lists,
                                                                 const gpu::ReversibleAdamArguments* arguments);
