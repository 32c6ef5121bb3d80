#pragma once
#include "device/multi_tensor_lars.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, momentum buffers[, lower-precision model copies]. Two reductions. Norms are measured
 * unless is_skipped is set or the arguments bring them; `totals` and `tensors` of the arguments are filled in here. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_lars(const apex_place* place, const apex_tensor_lists* lists,
                                                      const gpu::LarsArguments* arguments);
