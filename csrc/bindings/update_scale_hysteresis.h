#pragma once
#include "host/update_scale_hysteresis.h"

#include "place.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "status.h"

namespace apex {
inline void update_scale_hysteresis(const at::Tensor& current_scale, const at::Tensor& growth_tracker,
                                    const at::Tensor& hysteresis_tracker, const at::Tensor& found_inf,
                                    double growth_factor, double backoff_factor, int64_t growth_interval,
                                    int64_t hysteresis) {
  const c10::Device device = current_scale.device();
  gpu::ScaleHysteresis a{};
  a.scale = scalar_pointer<float>(current_scale, "current_scale", device);
  a.growth_tracker = scalar_pointer<int32_t>(growth_tracker, "growth_tracker", device);
  a.hysteresis_tracker = scalar_pointer<int32_t>(hysteresis_tracker, "hysteresis_tracker", device);
  a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", device);
  a.growth_factor = growth_factor;
  a.backoff_factor = backoff_factor;
  a.growth_interval = int32_t(growth_interval);
  a.hysteresis = int32_t(hysteresis);
  const apex_place place = place_of(device);
  const int32_t status = place.platform < 0 ? int32_t{APEX_USE_REFERENCE} : apex_update_scale_hysteresis(&place, &a);
  if (use_reference(status, "update_scale_hysteresis"))
    call_reference<decltype(update_scale_hysteresis)>("update_scale_hysteresis", current_scale, growth_tracker,
                                                      hysteresis_tracker, found_inf, growth_factor, backoff_factor,
                                                      growth_interval, hysteresis);
}
}  // namespace apex

APEX_IN_PLACE_OP(update_scale_hysteresis)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(update_scale_hysteresis, m) {
  m.def("update_scale_hysteresis", &apex::update_scale_hysteresis, pybind11::arg("current_scale"),
        pybind11::arg("growth_tracker"), pybind11::arg("hysteresis_tracker"), pybind11::arg("found_inf"),
        pybind11::arg("growth_factor"), pybind11::arg("backoff_factor"), pybind11::arg("growth_interval"),
        pybind11::arg("hysteresis"), pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
