// The weights' gradients of group norm: sums of what parts of images left for each channel.
#pragma once
#include "channel_apply.h"
#include "group_norm.h"

namespace gpu {
#if !defined(GPU_HOST)
// A block takes group_norm_finish_columns channels; its threads side by side take one each, the others further parts.
template <class Math> GPU_FN void group_norm_finish(const GroupNorm& a, u32 block) {
  constexpr u32 wide = group_norm_finish_columns, at_once = 4;
  GPU_SHARED(Math, sums, 2 * group_norm_threads);
  const u32 lane = thread_x() % wide, group = thread_x() / wide, groups = block_size_x() / wide;
  const i64 channel = (i64)block * wide + lane, parts = a.batch * a.parts;
  Math total[2] = {};
  if (channel < a.channels) {
    const Math* const from = reinterpret_cast<const Math*>(a.channel_partials) + channel;
    for (i64 part = group; part < parts; part += at_once * groups) {
      Math x[at_once][2] = {};
      GPU_UNROLL_FOR (u32 k = 0; k < at_once; ++k)
        if (part + k * groups < parts)
          GPU_UNROLL_FOR (int n = 0; n < 2; ++n) x[k][n] = from[((part + k * groups) * 2 + n) * a.channels];
      // These few are added together first: one long chain of sums would round more.
      GPU_UNROLL_FOR (int n = 0; n < 2; ++n) total[n] += (x[0][n] + x[1][n]) + (x[2][n] + x[3][n]);
    }
  }
  GPU_UNROLL_FOR (int n = 0; n < 2; ++n) sums[n * group_norm_threads + thread_x()] = total[n];
  sync_threads();
  if (group != 0 || channel >= a.channels) return;
  for (u32 other = 1; other < groups; ++other)
    GPU_UNROLL_FOR (int n = 0; n < 2; ++n) total[n] += sums[n * group_norm_threads + other * wide + lane];
  const Math of_bias[1] = {total[0]}, of_weight[1] = {total[1]};
  if (a.grad_bias) store_values(a.grad_bias, a.weight_type, channel, of_bias);
  if (a.grad_weight) store_values(a.grad_weight, a.weight_type, channel, of_weight);
}
#endif
}  // namespace gpu
