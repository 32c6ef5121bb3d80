// Launching batch norm's kernels (csrc/device/channel_reduce.h, channel_apply.h): geometry, checks, the one order of
// calls.
#pragma once
#include <algorithm>
#include <cstdint>

#include "apex.h"
#include "device/batchnorm_arguments.h"

namespace apex {
// The kernels of an op's reductions or passes; by apex_dtype.
struct ChannelReduceOp {
  const char* unit;
  apex_kernel first[4], last[4], last1[4];
  void (*cpu)(const gpu::ChannelReduce&);
};
struct ChannelApplyOp {
  const char* unit;
  apex_kernel any[4], last[4];
  void (*cpu)(const gpu::ChannelApply&);
  int64_t width = 0;  // elements that a thread takes at once; 0: a vector of 16 bytes
};

int32_t run_channel_reduce(ChannelReduceOp& op, const apex_place* place, gpu::ChannelReduce a,
                           const apex_workspace* workspace);
int32_t run_channel_apply(ChannelApplyOp& op, const apex_place* place, gpu::ChannelApply a);
}  // namespace apex

#define APEX_CHANNEL_KERNELS(unit, name) \
  {{unit, name "_f32", 0, 1}, {unit, name "_f16", 0, 1}, {unit, name "_bf16", 0, 1}, {unit, name "_f64", 0, 1}}
