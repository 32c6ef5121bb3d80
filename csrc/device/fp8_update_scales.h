// Delayed scaling's update, of all modules at once: arguments of the kernel and the CPU variant, by value, and the
// rule.
//
//   amax = the largest of a column of the history, or its row 0
//   scale = fp8_max / amax * factor, or what it was where amax is 0, infinite or NaN;  scale_inv = 1 / scale
// Then the history moves up by a row: row 0 becomes the last one, and row 0 is 0.
#pragma once
#include "reduce.h"

namespace gpu {
struct Fp8UpdateScales {
  float* amax_history;   // [rows][columns], rows `pitch` apart, columns `column_pitch`: one of them is 1
  float* scale;          // [columns]
  float* scale_inv;      // [columns]
  const float* fp8_max;  // [columns]
  const float* reduced;  // [columns], in the place of row 0; or null
  i64 rows, columns, pitch, column_pitch;
  float factor;  // 2^-margin
  i32 most_recent;
};
constexpr int fp8_update_threads = 512, fp8_update_columns = 8;

GPU_FN float delayed_scale(float amax, float old, float fp8_max, float factor) {
  const float found = fp8_max / amax * factor;
  const bool usable = amax > 0.0f && is_finite(amax);
  return !usable ? old : found > 3.4028235e38f ? 3.4028235e38f : found;
}

#if !defined(GPU_HOST)
// Scales were what `old` holds. A block has 8 columns, and 64 threads of each, with `many` rows a turn. Threads side by
// side take what lies side by side. Returns the column whose scales this thread wrote, or -1.
GPU_FN i64 update_scales(const Fp8UpdateScales& a, const float* old, u32 block) {
  constexpr u32 wide = fp8_update_columns, groups = fp8_update_threads / wide;
  constexpr int many = 16;
  GPU_SHARED(float, shared, fp8_update_threads);
  const bool upright = a.pitch == 1;
  const u32 lane = upright ? thread_x() / groups : thread_x() % wide;
  const u32 group = upright ? thread_x() % groups : thread_x() / wide;
  const i64 column = (i64)block * wide + lane;
  const bool works = column < a.columns;
  float* const history = a.amax_history + (works ? column * a.column_pitch : 0);
  const float newest = works ? a.reduced ? a.reduced[column] : history[0] : 0.0f;
  float largest = newest;
  for (i64 begin = 0; begin < a.rows; begin += groups * many) {
    float next[many];  // of the rows after these
    GPU_UNROLL_FOR (int k = 0; k < many; ++k) {
      const i64 row = begin + (i64)k * groups + group;
      next[k] = works && row + 1 < a.rows ? history[(row + 1) * a.pitch] : newest;
      largest = Maximum::combine(largest, next[k]);
    }
    sync_threads();
    GPU_UNROLL_FOR (int k = 0; k < many; ++k) {
      const i64 row = begin + (i64)k * groups + group;
      if (works && row < a.rows) history[row * a.pitch] = row == 0 ? 0.0f : next[k];
    }
  }
  shared[group * wide + lane] = largest;
  sync_threads();
  if (group != 0 || !works) return -1;
  for (u32 k = 1; k < groups; ++k) largest = Maximum::combine(largest, shared[k * wide + lane]);
  const float scale = delayed_scale(a.most_recent ? newest : largest, old[column], a.fp8_max[column], a.factor);
  a.scale[column] = scale;
  a.scale_inv[column] = 1.0f / scale;
  return column;
}
#endif
}  // namespace gpu
