#pragma once
#include "apex.h"
#include "device/batchnorm_arguments.h"

extern "C" APEX_EXPORT int32_t apex_relu_bw(const apex_place* place, const gpu::ChannelApply* arguments);
