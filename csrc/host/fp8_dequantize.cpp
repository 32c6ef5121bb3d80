#include "fp8_dequantize.h"

#include "device_limits.h"
#include "fp8_checks.h"

extern "C" int32_t apex_fp8_dequantize(const apex_place* place, const gpu::Fp8Dequantize* arguments) {
  static apex_kernel kernel = {"fp8_dequantize", "fp8_dequantize_any", 0, 1};
  gpu::Fp8Dequantize a = *arguments;
  if (const int32_t status = apex::check_fp8(kernel.unit, a.type, a.format, a.scale_inv, "scale_inv")) return status;
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, kernel.unit, &variant)) return status;
  if (variant == APEX_VARIANT_CPU) {
    apex::fp8_dequantize_cpu(a);
    return APEX_OK;
  }
  a.vectors = (apex::bits_of(a.input) | apex::bits_of(a.output)) % 16 == 0;
  constexpr int64_t in_block = gpu::fp8_dequantize_threads * gpu::fp8_dequantize_width;
  void* parameters[] = {&a};
  return apex_launch(place, &kernel, {uint32_t(apex::ceil_divide(a.count, in_block)), 1, 1},
                     {gpu::fp8_dequantize_threads, 1, 1}, 0, parameters);
}
