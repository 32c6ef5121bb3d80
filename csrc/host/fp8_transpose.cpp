// The transpose of FP8 matrices: launches. csrc/device/fp8_transpose.h says what is computed.
#include "fp8_transpose.h"

#include "device/column_sums.h"
#include "device_limits.h"
#include "fp8_checks.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "fp8_transpose";
apex_kernel wide_kernel = {unit, "fp8_transpose_x16", 0, 1}, single_kernel = {unit, "fp8_transpose_x1", 0, 1},
            sums_kernel = {unit, "fp8_transpose_sums", 0, 1};

int32_t launch_all(const apex_place* place, gpu::Fp8Transpose a) {
  void* parameters[] = {&a};
  int32_t status = APEX_OK;
  if (a.rows > 0) {
    const bool vectors = a.columns % 16 == 0 && bits_of(a.input) % 16 == 0;
    a.wide_columns = a.rows % 16 == 0 && bits_of(a.output) % 16 == 0;
    a.column_blocks = uint32_t(ceil_divide(a.columns, gpu::fp8_lanes * (vectors ? 16 : 1)));
    const uint32_t blocks = a.column_blocks * uint32_t(ceil_divide(a.rows, gpu::fp8_tile_rows));
    status = apex_launch(place, vectors ? &wide_kernel : &single_kernel, {blocks, 1, 1}, {gpu::fp8_tile_threads, 1, 1},
                         0, parameters);
  }
  if (status != APEX_OK || !a.grad_bias) return status;
  const uint32_t blocks = uint32_t(ceil_divide(a.columns, gpu::column_sums_columns(a.columns)));
  return apex_launch(place, &sums_kernel, {blocks, 1, 1}, {gpu::column_sums_threads, 1, 1}, 0, parameters);
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_fp8_transpose(const apex_place* place, const gpu::Fp8Transpose* arguments,
                                      const apex_workspace* workspace) {
  gpu::Fp8Transpose a = *arguments;
  const void* number = a.grad_bias ? static_cast<const void*>(a.scale_inv) : place;
  if (const int32_t status = apex::check_fp8(apex::unit, a.type, a.format, number, "scale_inv")) return status;
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, apex::unit, &variant)) return status;
  if (a.columns == 0) return APEX_OK;
  const int64_t sums = a.grad_bias ? apex::ceil_divide(a.rows, gpu::fp8_tile_rows) * a.columns : 0;
  if (const int32_t status = apex::take_workspace(workspace, sums * int64_t(sizeof(float)), &a.partials)) return status;
  if (variant != APEX_VARIANT_CPU) return apex::launch_all(place, a);
  apex::fp8_transpose_cpu(a);
  return APEX_OK;
}
