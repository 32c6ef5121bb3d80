#pragma once
#include "device/multi_tensor_rmsprop.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, averages of squares[, averages of gradients][, momentum buffers]. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_rmsprop(const apex_place* place, const apex_tensor_lists* lists,
                                                         const gpu::RmspropArguments* arguments);
