// Delayed scaling's update of many histories in one launch: arguments of the kernel and the CPU variant, by value. What
// is computed is what fp8_update_scales.h says, of each; new scales go elsewhere than the old ones lie. Histories that
// lie one behind the other in memory, as their scales do, are one.
#pragma once
#include "fp8_update_scales.h"

namespace gpu {
constexpr int fp8_multi_update_most = 120;  // histories of a launch: kernels take 4 KB of arguments

struct Fp8MultiUpdateScales {
  u64 history[120];  // [rows][columns of its own]
  u64 old[120];      // its scales [columns]
  u32 pitch[120];    // from a row to the next
  u32 column_pitch[120];
  u32 first[121];        // columns of all before it; behind them, of all
  u32 first_block[120];  // blocks before it
  i32 count;
  float* scale;          // [all columns]
  float* scale_inv;      // [all columns]
  const float* fp8_max;  // [all columns]
  i64 rows;
  float factor;  // 2^-margin
  i32 most_recent;
  float* scale_inv_apart;  // [all columns][4], whose first ones are scale_inv again, each on 16 bytes; or null
};
static_assert(sizeof(Fp8MultiUpdateScales) <= 4096, "what a kernel is given");

// Of one history, which lies at `history`.
GPU_FN Fp8UpdateScales one_of(const Fp8MultiUpdateScales& a, i32 i, float* history) {
  Fp8UpdateScales one{};
  const i64 first = a.first[i];
  one.amax_history = history;
  one.scale = a.scale + first, one.scale_inv = a.scale_inv + first, one.fp8_max = a.fp8_max + first;
  one.rows = a.rows, one.columns = a.first[i + 1] - first;
  one.pitch = a.pitch[i], one.column_pitch = a.column_pitch[i];
  one.factor = a.factor, one.most_recent = a.most_recent;
  return one;
}
}  // namespace gpu
