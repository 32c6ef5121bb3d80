#include "update_scale_hysteresis.h"

#include "status.h"

extern "C" int32_t apex_update_scale_hysteresis(const apex_place* place, const gpu::ScaleHysteresis* arguments) {
  static apex_kernel kernel = {"update_scale_hysteresis", "update_scale_hysteresis_f32", 0};
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, kernel.unit, &variant)) return status;
  if (variant == APEX_VARIANT_CPU) {
    gpu::update_scale_hysteresis(*arguments);
    return APEX_OK;
  }
  void* parameters[] = {const_cast<gpu::ScaleHysteresis*>(arguments)};
  return apex_launch(place, &kernel, {1, 1, 1}, {1, 1, 1}, 0, parameters);
}
