// Who works on a row of logits: a warp or a block.
#pragma once
#include "gpu.h"

namespace gpu {
#if !defined(GPU_HOST)
// The threads that work on a row, or on their split of it, together.
struct LogitTeam {
  bool is_warp;
  u32 rank, size;
  i64 first, stride;

  GPU_FN explicit LogitTeam(bool warp_rows) : is_warp(warp_rows) {
    const u32 warps = block_size_x() / warp_size;
    rank = is_warp ? lane_id() : thread_x();
    size = is_warp ? (u32)warp_size : block_size_x();
    first = is_warp ? (i64)block_x() * warps + thread_x() / warp_size : (i64)block_x();
    stride = is_warp ? (i64)grid_x() * warps : (i64)grid_x();
  }
};
#endif
}  // namespace gpu
