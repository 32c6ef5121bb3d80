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

// Fills in the geometry: `partials` must hold parts * 3 * channels floats (or doubles) before the launch if parts > 1
// or the place is a CPU, and `counters` channel_counters() zeros.
int32_t prepare_channel_reduce(const ChannelReduceOp& op, const apex_place* place, gpu::ChannelReduce* a,
                               int32_t* variant);
int32_t run_channel_reduce(ChannelReduceOp& op, const apex_place* place, const gpu::ChannelReduce& prepared,
                           int32_t variant);
inline int64_t channel_counters(const gpu::ChannelReduce& a) {
  return a.parts <= 1 ? 0 : a.channels_last ? int64_t(a.column_blocks) : a.channels;
}
int32_t run_channel_apply(ChannelApplyOp& op, const apex_place* place, gpu::ChannelApply a);
}  // namespace apex

#define APEX_CHANNEL_KERNELS(unit, name) \
  {{unit, name "_f32", 0, 1}, {unit, name "_f16", 0, 1}, {unit, name "_bf16", 0, 1}, {unit, name "_f64", 0, 1}}
