#pragma once
#include "host/multi_tensor_axpby.h"

#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
inline void multi_tensor_axpby(at::TensorList x, at::TensorList y, at::TensorList outputs,
                               const std::optional<at::Tensor>& noop_flag, double a, double b, int64_t arg_to_check,
                               const std::optional<at::Tensor>& a_tensor) {
  TORCH_CHECK_VALUE(arg_to_check >= -1 && arg_to_check <= 1,
                    "multi_tensor_axpby: arg_to_check is 0 (x), 1 (y) or -1 (both), not ", arg_to_check);
  const TensorPlan::Op op{"multi_tensor_axpby", 0,
                          [&](const TensorPlan::Launch& l) {
                            gpu::AxpbyArguments arguments{};
                            arguments.a = a;
                            arguments.b = b;
                            arguments.a_on_device = scalar_pointer<const float>(a_tensor, "a_tensor", l.device);
                            arguments.noop_flag = scalar_pointer<int32_t>(noop_flag, "noop_flag", l.device);
                            arguments.check = int32_t(arg_to_check);
                            return apex_multi_tensor_axpby(&l.place, &l.lists, &arguments);
                          },
                          [&](const TensorPlan::Tensors& t, const TensorPlan::Launch&) {
                            call_reference<decltype(multi_tensor_axpby)>("multi_tensor_axpby", t[0], t[1], t[2],
                                                                         noop_flag, a, b, arg_to_check, a_tensor);
                          }};
  run_once(op, {"x", "y", "outputs"}, 0b100, {x, y, outputs});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_axpby)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_axpby, m) {
  m.def(
      "multi_tensor_axpby",
      [](const std::optional<at::Tensor>& noop_flag, const std::vector<std::vector<at::Tensor>>& lists, double a,
         double b, int64_t arg_to_check, const std::optional<at::Tensor>& a_tensor) {
        apex::check_lists("multi_tensor_axpby", lists, 3);
        apex::multi_tensor_axpby(lists[0], lists[1], lists[2], noop_flag, a, b, arg_to_check, a_tensor);
      },
      pybind11::arg("noop_flag"), pybind11::arg("tensor_lists"), pybind11::arg("a"), pybind11::arg("b"),
      pybind11::arg("arg_to_check") = -1, pybind11::arg("a_tensor") = std::nullopt,
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
