// Arguments of group norm's kernels (group_norm.h), by value: the bindings fill them in.
//
// "Math" below is float, or double for double tensors.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 group_norm_threads = 256;         // of a block, at most
constexpr u32 group_norm_tile_threads = 384;    // likewise, of a block that keeps its part of an image
constexpr u32 group_norm_halves_threads = 288;  // likewise, of halves
constexpr u32 group_norm_finish_columns = 32;   // channels of a block that adds partial sums up

struct GroupNorm {
  const u8* input;        // [batch][channels][spatial], or channels last [batch][spatial][channels]
  const u8* grad_output;  // as the input; backward alone
  const u8* weight;       // [channels], weight_type; or null
  const u8* bias;         // likewise
  u8* output;             // as the input: the result, or the input's gradient
  u8* mean;               // [batch][groups], Math; the forward writes it
  u8* rstd;               // likewise: 1 / the standard deviation
  u8* grad_weight;        // [channels], weight_type; or null
  u8* grad_bias;          // likewise
  u8* group_partials;     // [batch][groups][slots][2], Math
  u8* channel_partials;   // [batch][parts][2][channels], Math; backward alone
  i64 batch, channels, spatial, groups;
  double eps;
  i32 input_type, weight_type, channels_last, silu;
  // Channels last, a strip of an image is some adjacent channels: `columns` vectors side by side in a block, `lanes`
  // rows at once. Channels first it is a group.
  u32 columns, lanes, strips;
  u32 parts;         // of a strip
  i64 part_size;     // rows of a part, or vectors of one
  u32 slots;         // partial results of a group of an image
  u32 team;          // channels first, backward: threads that share a channel, a power of two
  u32 apply_blocks;  // of the apply kernel: its other blocks add up the weights' gradients
  u32 reserved;
  u32* counters;  // [strips], zero before and after; or null
};
}  // namespace gpu
