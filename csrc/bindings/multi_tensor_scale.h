#pragma once
#include "host/multi_tensor_scale.h"

#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
inline void multi_tensor_scale(at::TensorList inputs, at::TensorList outputs,
                               const std::optional<at::Tensor>& noop_flag, double scale,
                               const std::optional<at::Tensor>& scale_tensor, bool skip_one) {
  const TensorPlan::Op op{"multi_tensor_scale", 0,
                          [&](const TensorPlan::Launch& l) {
                            gpu::ScaleArguments a{};
                            a.scale = scale;
                            a.scale_on_device = scalar_pointer<const float>(scale_tensor, "scale_tensor", l.device);
                            a.skip_one = skip_one;
                            a.noop_flag = scalar_pointer<int32_t>(noop_flag, "noop_flag", l.device);
                            return apex_multi_tensor_scale(&l.place, &l.lists, &a);
                          },
                          [&](const TensorPlan::Tensors& t, const TensorPlan::Launch&) {
                            call_reference<decltype(multi_tensor_scale)>("multi_tensor_scale", t[0], t[1], noop_flag,
                                                                         scale, scale_tensor, skip_one);
                          }};
  run_once(op, {"inputs", "outputs"}, 0b10, {inputs, outputs});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_scale)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_scale, m) {
  m.def(
      "multi_tensor_scale",
      [](const std::optional<at::Tensor>& noop_flag, const std::vector<std::vector<at::Tensor>>& lists, double scale,
         const std::optional<at::Tensor>& scale_tensor, bool skip_one) {
        apex::check_lists("multi_tensor_scale", lists, 2);
        apex::multi_tensor_scale(lists[0], lists[1], noop_flag, scale, scale_tensor, skip_one);
      },
      pybind11::arg("noop_flag"), pybind11::arg("tensor_lists"), pybind11::arg("scale"),
      pybind11::arg("scale_tensor") = std::nullopt, pybind11::arg("skip_one") = false,
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
