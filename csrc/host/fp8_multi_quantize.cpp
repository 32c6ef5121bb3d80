// Casts of many matrices to FP8: launches. csrc/device/fp8_multi_quantize.h says what is computed.
#include "fp8_multi_quantize.h"

#include "device_limits.h"
#include "fp8_checks.h"
#include "fp8_quantize.h"

namespace apex {
namespace {
constexpr const char* unit = "fp8_multi_quantize";
enum Kind { bf16x8, f16x8, f32x4, any1 };
apex_kernel kernels[4] = {{unit, "fp8_multi_quantize_bf16x8", 0, 1},
                          {unit, "fp8_multi_quantize_f16x8", 0, 1},
                          {unit, "fp8_multi_quantize_f32x4", 0, 1},
                          {unit, "fp8_multi_quantize_any1", 0, 1}};

void run_on_cpu(const gpu::Fp8MultiQuantize& all) {
  for (int32_t i = 0; i < all.count; ++i) {
    gpu::Fp8Quantize a{};
    a.input = reinterpret_cast<const uint8_t*>(all.input[i]);
    a.by_row = reinterpret_cast<uint8_t*>(all.by_row[i]);
    a.by_column = reinterpret_cast<uint8_t*>(all.by_column[i]);
    a.rows = all.rows[i], a.columns = all.columns[i];
    a.scale = all.scale + i, a.amax = all.amax ? all.amax + i : nullptr;
    a.type = all.type, a.format = all.format;
    if (a.columns > 0) fp8_quantize_cpu(a);
  }
}
// One kernel for all: whole vectors where every matrix has them.
int32_t launch(const apex_place* place, gpu::Fp8MultiQuantize& a) {
  const Kind wide = a.type == APEX_BF16 ? bf16x8 : a.type == APEX_F16 ? f16x8 : f32x4;
  const int64_t vector = wide == f32x4 ? 4 : 8;
  bool vectors = true;
  for (int32_t i = 0; i < a.count; ++i)
    vectors = vectors && a.columns[i] % vector == 0 && a.input[i] % 16 == 0 && a.by_row[i] % uint64_t(vector) == 0;
  uint32_t blocks = 0;
  for (int32_t i = 0; i < a.count; ++i) {
    a.first_block[i] = blocks;
    blocks += uint32_t(ceil_divide(a.columns[i], gpu::fp8_lanes * (vectors ? vector : 1)) *
                       ceil_divide(a.rows[i], gpu::fp8_tile_rows));
  }
  void* parameters[] = {&a};
  return apex_launch(place, &kernels[vectors ? wide : any1], {blocks, 1, 1}, {gpu::fp8_tile_threads, 1, 1}, 0,
                     parameters);
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_fp8_multi_quantize(const apex_place* place, const gpu::Fp8MultiQuantize* arguments) {
  gpu::Fp8MultiQuantize a = *arguments;
  if (const int32_t status = apex::check_fp8(apex::unit, a.type, a.format, a.scale, "scale")) return status;
  if (a.count < 0 || a.count > gpu::fp8_multi_most)
    return apex::fail(APEX_ERROR_VALUE, "fp8_multi_quantize: %d matrices, a launch takes up to %d", int(a.count),
                      gpu::fp8_multi_most);
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, apex::unit, &variant)) return status;
  if (variant != APEX_VARIANT_CPU) return apex::launch(place, a);
  apex::run_on_cpu(a);
  return APEX_OK;
}
