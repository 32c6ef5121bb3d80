#pragma once
#include "apex.h"
#include "device/batchnorm_arguments.h"

/* As those of welford_mean_var.h. */
extern "C" APEX_EXPORT int32_t apex_reduce_bn_prepare(const apex_place* place, gpu::ChannelReduce* arguments,
                                                      int64_t* counters, int32_t* variant);
extern "C" APEX_EXPORT int32_t apex_reduce_bn(const apex_place* place, const gpu::ChannelReduce* arguments,
                                              int32_t variant);
