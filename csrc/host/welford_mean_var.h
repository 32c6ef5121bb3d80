#pragma once
#include "apex.h"
#include "device/batchnorm_arguments.h"

extern "C" APEX_EXPORT int32_t apex_welford_mean_var(const apex_place* place, const gpu::ChannelReduce* arguments,
                                                     const apex_workspace* workspace);
