#pragma once
#include "apex.h"
#include "device/batchnorm_arguments.h"

/* prepare: as prepare_channel_reduce of channel.h; how many counters, through `counters`. */
extern "C" APEX_EXPORT int32_t apex_welford_mean_var_prepare(const apex_place* place, gpu::ChannelReduce* arguments,
                                                             int64_t* counters, int32_t* variant);
extern "C" APEX_EXPORT int32_t apex_welford_mean_var(const apex_place* place, const gpu::ChannelReduce* arguments,
                                                     int32_t variant);
