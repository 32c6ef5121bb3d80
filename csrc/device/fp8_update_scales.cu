// The kernel of delayed scaling's update (fp8_update_scales.h): one read and one write of the history, 8 bytes a
// number.
#include "fp8_update_scales.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
// A block has 8 columns, and 64 threads of each, with `many` rows a turn.
GPU_FN void update_scales(const Fp8UpdateScales& a) {
  constexpr u32 wide = fp8_update_columns, groups = fp8_update_threads / wide;
  constexpr int many = 16;
  GPU_SHARED(float, shared, fp8_update_threads);
  const u32 lane = thread_x() % wide, group = thread_x() / wide;
  const i64 column = (i64)block_x() * wide + lane;
  const bool works = column < a.columns;
  float* const history = a.amax_history + (works ? column : 0);
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
  shared[thread_x()] = largest;
  sync_threads();
  if (group != 0 || !works) return;
  for (u32 k = 1; k < groups; ++k) largest = Maximum::combine(largest, shared[k * wide + lane]);
  const float scale = delayed_scale(a.most_recent ? newest : largest, a.scale[column], a.fp8_max[column], a.factor);
  a.scale[column] = scale;
  a.scale_inv[column] = 1.0f / scale;
}
#endif
}  // namespace
}  // namespace gpu

extern "C" GPU_KERNEL(gpu::fp8_update_threads) void fp8_update_scales_f32(gpu::Fp8UpdateScales arguments) {
  gpu::await_previous_kernel();
  gpu::update_scales(arguments);
}
GPU_REGISTER(fp8_update_scales_f32)
