// Delayed scaling's update. csrc/device/fp8_update_scales.h says what is computed.
#include "fp8_update_scales.h"

#include <algorithm>
#include <cstring>

#include "device_limits.h"
#include "status.h"

namespace apex {
namespace {
// Column by column, each of which lies by itself.
void update_upright(const gpu::Fp8UpdateScales& a) {
  for (int64_t j = 0; j < a.columns; ++j) {
    float* const history = a.amax_history + j * a.column_pitch;
    const float newest = a.reduced ? a.reduced[j] : history[0];
    float largest = newest;
    for (int64_t row = 1; row < a.rows; ++row) largest = gpu::Maximum::combine(largest, history[row]);
    std::memmove(history, history + 1, size_t(a.rows - 1) * sizeof(float));
    history[a.rows - 1] = newest;
    history[0] = 0.0f;
    a.scale[j] = gpu::delayed_scale(a.most_recent ? newest : largest, a.scale[j], a.fp8_max[j], a.factor);
    a.scale_inv[j] = 1.0f / a.scale[j];
  }
}
}  // namespace

// Some columns at once, row by row: rows lie side by side.
void fp8_update_scales_cpu(const gpu::Fp8UpdateScales& a) {
  if (a.pitch == 1) return update_upright(a);
  constexpr int64_t wide = 256;
  float newest[wide], largest[wide];
  for (int64_t first = 0; first < a.columns; first += wide) {
    const int64_t n = std::min<int64_t>(wide, a.columns - first);
    float* const history = a.amax_history + first;
    std::memcpy(newest, a.reduced ? a.reduced + first : history, size_t(n) * sizeof(float));
    std::memcpy(largest, newest, size_t(n) * sizeof(float));
    for (int64_t row = 1; row < a.rows; ++row) {
      float* const from = history + row * a.pitch;
      for (int64_t j = 0; j < n; ++j) largest[j] = gpu::Maximum::combine(largest[j], from[j]);
      std::memmove(from - a.pitch, from, size_t(n) * sizeof(float));
    }
    std::memcpy(history + (a.rows - 1) * a.pitch, newest, size_t(n) * sizeof(float));
    std::fill(history, history + n, 0.0f);
    for (int64_t j = 0; j < n; ++j) {
      float& scale = a.scale[first + j];
      scale = gpu::delayed_scale(a.most_recent ? newest[j] : largest[j], scale, a.fp8_max[first + j], a.factor);
      a.scale_inv[first + j] = 1.0f / scale;
    }
  }
}
}  // namespace apex

extern "C" int32_t apex_fp8_update_scales(const apex_place* place, const gpu::Fp8UpdateScales* arguments) {
  static apex_kernel kernel = {"fp8_update_scales", "fp8_update_scales_f32", 0, 1};
  if (arguments->rows < 1)
    return apex::fail(APEX_ERROR_VALUE, "fp8_update_scales: the history must have at least one row");
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, kernel.unit, &variant)) return status;
  if (variant == APEX_VARIANT_CPU) {
    apex::fp8_update_scales_cpu(*arguments);
    return APEX_OK;
  }
  void* parameters[] = {const_cast<gpu::Fp8UpdateScales*>(arguments)};
  const uint32_t blocks = uint32_t(apex::ceil_divide(arguments->columns, gpu::fp8_update_columns));
  return apex_launch(place, &kernel, {blocks, 1, 1}, {gpu::fp8_update_threads, 1, 1}, 0, parameters);
}
