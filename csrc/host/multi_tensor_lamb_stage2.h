#pragma once
#include "device/multi_tensor_lamb_stage2.h"
#include "host/multi_tensor.h"

/* Lists: parameters, updates[, model copies]. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_lamb_stage2(const apex_place* place, const apex_tensor_lists* lists,
                                                             const gpu::LambStage2Arguments* arguments);
