// Block scaling's casts: launches. csrc/device/fp8_quantize_blocks.h says what is computed.
#include "fp8_quantize_blocks.h"

#include "device_limits.h"
#include "fp8_checks.h"

extern "C" int32_t apex_fp8_quantize_blocks(const apex_place* place, const gpu::Fp8QuantizeBlocks* arguments) {
  static apex_kernel kernel = {"fp8_quantize_blocks", "fp8_quantize_blocks_any", 0, 1};
  gpu::Fp8QuantizeBlocks a = *arguments;
  const void* scales = a.square || a.by_row ? a.scale_inv : a.scale_inv_turned;
  if (a.rows == 0 || a.columns == 0) scales = place;
  if (const int32_t status = apex::check_fp8(kernel.unit, a.type, a.format, scales, "scale_inv")) return status;
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, kernel.unit, &variant)) return status;
  if (a.rows == 0 || a.columns == 0) return APEX_OK;
  a.column_blocks = uint32_t(apex::ceil_divide(a.columns, gpu::fp8_block));
  if (variant == APEX_VARIANT_CPU) {
    apex::fp8_quantize_blocks_cpu(a);
    return APEX_OK;
  }
  a.vectors = a.columns % 8 == 0 && apex::bits_of(a.input) % 16 == 0 && apex::bits_of(a.by_row) % 8 == 0;
  a.wide_columns = a.rows % 16 == 0 && apex::bits_of(a.by_column) % 16 == 0;
  const uint32_t blocks = a.column_blocks * uint32_t(apex::ceil_divide(a.rows, gpu::fp8_block));
  void* parameters[] = {&a};
  return apex_launch(place, &kernel, {blocks, 1, 1}, {gpu::fp8_tile_threads, 1, 1}, 0, parameters);
}
