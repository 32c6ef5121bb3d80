// Delayed scaling's update of many histories: launches. csrc/device/fp8_multi_update_scales.h says what is computed.
#include "fp8_multi_update_scales.h"

#include <algorithm>

#include "device_limits.h"
#include "fp8_update_scales.h"
#include "status.h"

namespace apex {
namespace {
constexpr const char* unit = "fp8_multi_update_scales";

void run_on_cpu(const gpu::Fp8MultiUpdateScales& a) {
  for (int32_t i = 0; i < a.count; ++i) {
    const gpu::Fp8UpdateScales one = gpu::one_of(a, i, reinterpret_cast<float*>(a.history[i]));
    std::copy_n(reinterpret_cast<const float*>(a.old[i]), one.columns, one.scale);
    fp8_update_scales_cpu(one);
  }
}
int32_t launch(const apex_place* place, gpu::Fp8MultiUpdateScales a) {
  static apex_kernel kernel = {unit, "fp8_multi_update_scales_f32", 0, 1};
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

extern "C" int32_t apex_fp8_multi_update_scales(const apex_place* place, const gpu::Fp8MultiUpdateScales* arguments) {
  const gpu::Fp8MultiUpdateScales& a = *arguments;
  if (a.count < 0 || a.count > gpu::fp8_multi_update_most)
    return apex::fail(APEX_ERROR_VALUE, "fp8_multi_update_scales: %d histories, a launch takes up to %d", int(a.count),
                      gpu::fp8_multi_update_most);
  if (a.rows < 1) return apex::fail(APEX_ERROR_VALUE, "fp8_multi_update_scales: histories must have at least one row");
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, apex::unit, &variant)) return status;
  if (variant != APEX_VARIANT_CPU) return apex::launch(place, a);
  apex::run_on_cpu(a);
  return APEX_OK;
}
