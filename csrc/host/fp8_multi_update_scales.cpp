// Delayed scaling's update of many histories: launches. csrc/device/fp8_multi_update_scales.h says what is computed.
#include "fp8_multi_update_scales.h"

#include <algorithm>
#include <cstdint>

#include "device/fp8_multi_update_scales.h"
#include "device_limits.h"
#include "fp8_update_scales.h"
#include "status.h"

namespace apex {
namespace {
constexpr const char* unit = "fp8_multi_update_scales";

uint64_t address(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

// Whether a history begins where the last run ends, as its scales do.
bool continues(const gpu::Fp8MultiUpdateScales& a, const apex_fp8_history& next) {
  if (a.count == 0) return false;
  const int32_t last = a.count - 1;
  const uint64_t columns = a.first[a.count] - a.first[last];
  return a.pitch[last] == next.pitch && a.column_pitch[last] == next.column_pitch &&
         a.history[last] + columns * next.column_pitch * sizeof(float) == address(next.amax_history) &&
         a.old[last] + columns * sizeof(float) == address(next.scale);
}
void add(gpu::Fp8MultiUpdateScales& a, const apex_fp8_history& next) {
  if (!continues(a, next)) {
    const int32_t i = a.count++;
    a.history[i] = address(next.amax_history), a.old[i] = address(next.scale);
    a.pitch[i] = next.pitch, a.column_pitch[i] = next.column_pitch;
    a.first[i + 1] = a.first[i];
  }
  a.first[a.count] += uint32_t(next.columns);
}

void run_on_cpu(const gpu::Fp8MultiUpdateScales& a) {
  for (int32_t i = 0; i < a.count; ++i) {
    const gpu::Fp8UpdateScales one = gpu::one_of(a, i, reinterpret_cast<float*>(a.history[i]));
    std::copy_n(reinterpret_cast<const float*>(a.old[i]), one.columns, one.scale);
    fp8_update_scales_cpu(one);
    for (int64_t j = 0; a.scale_inv_apart && j < one.columns; ++j)
      a.scale_inv_apart[(a.first[i] + j) * 4] = one.scale_inv[j];
  }
}
int32_t run(const apex_place* place, int32_t variant, gpu::Fp8MultiUpdateScales& a) {
  static apex_kernel kernel = {unit, "fp8_multi_update_scales_f32", 0, 1};
  if (a.count == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    run_on_cpu(a);
    return APEX_OK;
  }
  uint32_t blocks = 0;
  for (int32_t i = 0; i < a.count; ++i) {
    a.first_block[i] = blocks;
    blocks += uint32_t(ceil_divide(int64_t(a.first[i + 1]) - a.first[i], gpu::fp8_update_columns));
  }
  void* parameters[] = {&a};
  return apex_launch(place, &kernel, {blocks, 1, 1}, {gpu::fp8_update_threads, 1, 1}, 0, parameters);
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_fp8_multi_update_scales(const apex_place* place, const apex_fp8_updates* updates,
                                                const apex_fp8_history* histories) {
  const apex_fp8_updates& u = *updates;
  if (u.count < 0) return apex::fail(APEX_ERROR_VALUE, "fp8_multi_update_scales: %lld histories", (long long)u.count);
  if (u.rows < 1) return apex::fail(APEX_ERROR_VALUE, "fp8_multi_update_scales: histories must have at least one row");
  int64_t columns = 0;
  for (int64_t i = 0; i < u.count; ++i) columns += histories[i].columns;
  if (columns > int64_t{UINT32_MAX})
    return apex::fail(APEX_ERROR_VALUE, "fp8_multi_update_scales: %lld columns", (long long)columns);
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, apex::unit, &variant)) return status;
  gpu::Fp8MultiUpdateScales a{};
  a.scale = u.scale, a.scale_inv = u.scale_inv, a.fp8_max = u.fp8_max;
  a.rows = u.rows, a.factor = u.factor, a.most_recent = u.most_recent, a.scale_inv_apart = u.scale_inv_apart;
  for (int64_t i = 0; i < u.count; ++i) {
    if (histories[i].columns == 0) continue;
    if (a.count == gpu::fp8_multi_update_most && !apex::continues(a, histories[i])) {
      if (const int32_t status = apex::run(place, variant, a)) return status;
      const uint32_t done = a.first[a.count];
      a.scale += done, a.scale_inv += done, a.fp8_max += done, a.count = 0;
      if (a.scale_inv_apart) a.scale_inv_apart += int64_t{4} * done;
    }
    apex::add(a, histories[i]);
  }
  return apex::run(place, variant, a);
}
