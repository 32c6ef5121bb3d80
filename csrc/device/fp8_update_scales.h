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
  float* amax_history;   // [rows][columns], rows `pitch` apart
  float* scale;          // [columns]
  float* scale_inv;      // [columns]
  const float* fp8_max;  // [columns]
  const float* reduced;  // [columns], in the place of row 0; or null
  i64 rows, columns, pitch;
  float factor;  // 2^-margin
  i32 most_recent;
};
constexpr int fp8_update_threads = 512, fp8_update_columns = 8;

GPU_FN float delayed_scale(float amax, float old, float fp8_max, float factor) {
  const float found = fp8_max / amax * factor;
  const bool usable = amax > 0.0f && is_finite(amax);
  return !usable ? old : found > 3.4028235e38f ? 3.4028235e38f : found;
}
}  // namespace gpu
