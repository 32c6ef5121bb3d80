#pragma once
#include "apex.h"
#include "device/batchnorm_arguments.h"

extern "C" APEX_EXPORT int32_t apex_groupbn_forward(const apex_place* place, const gpu::ChannelApply* arguments);
extern "C" APEX_EXPORT int32_t apex_groupbn_backward(const apex_place* place, const gpu::ChannelApply* arguments);
