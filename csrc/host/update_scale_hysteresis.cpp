#include "update_scale_hysteresis.h"

extern "C" int32_t apex_update_scale_hysteresis(const apex_place* place, const gpu::ScaleHysteresis* arguments) {
  static apex_kernel kernel = {"update_scale_hysteresis", "update_scale_hysteresis_f32", 0};
  switch (apex_resolve(place->platform, place->device, kernel.unit)) {
    case APEX_VARIANT_KERNEL: {
      void* parameters[] = {const_cast<gpu::ScaleHysteresis*>(arguments)};
      return apex_launch(place, &kernel, {1, 1, 1}, {1, 1, 1}, 0, parameters);
    }
    case APEX_VARIANT_CPU:
      gpu::update_scale_hysteresis(*arguments);
      return APEX_OK;
    case APEX_VARIANT_REFERENCE:
      return APEX_USE_REFERENCE;
    default:
      return APEX_ERROR_NO_VARIANT;  // the resolver left its reason in apex_last_error
  }
}
