// Who works on a row of logits: some lanes of a warp, a warp or a block.
#pragma once
#include "gpu.h"

namespace gpu {
#if !defined(GPU_HOST)
// The threads that work on a row, or on their split of it, together.
struct LogitTeam {
  static constexpr i32 log_warp = warp_size == 64 ? 6 : 5;
  bool is_warp;         // or a part of one
  u32 rank, size, own;  // own: which of the teams of its warp
  i64 first, stride;

  // 2^log_lanes threads side by side, at most a warp; -1: the block.
  GPU_FN explicit LogitTeam(i32 log_lanes) : is_warp(log_lanes >= 0) {
    const u32 teams = is_warp ? block_size_x() >> log_lanes : 1;
    size = is_warp ? 1u << log_lanes : block_size_x();
    rank = is_warp ? thread_x() & (size - 1) : thread_x();
    own = is_warp ? lane_id() >> log_lanes : 0;
    first = is_warp ? (i64)block_x() * teams + (thread_x() >> log_lanes) : (i64)block_x();
    stride = (i64)grid_x() * teams;
  }
};
#endif
}  // namespace gpu
