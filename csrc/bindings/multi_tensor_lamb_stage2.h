#pragma once
#include "host/multi_tensor_lamb_stage2.h"

#include "per_tensor.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
inline void multi_tensor_lamb_stage2(at::TensorList params, at::TensorList updates,
                                     const at::Tensor& per_tensor_param_norm, const at::Tensor& per_tensor_update_norm,
                                     double lr, double weight_decay, bool use_nvlamb) {
  const TensorPlan::Op op{"multi_tensor_lamb_stage2", 0,
                          [&](const TensorPlan::Launch& l) {
                            const PerTensor param_norms(per_tensor_param_norm, l, "per_tensor_param_norm");
                            const PerTensor update_norms(per_tensor_update_norm, l, "per_tensor_update_norm");
                            gpu::LambStage2Arguments a{};
                            a.lr = lr;
                            a.scaled = use_nvlamb || weight_decay != 0;
                            a.parameter_norms = param_norms.pointer();
                            a.update_norms = update_norms.pointer();
                            return apex_multi_tensor_lamb_stage2(&l.place, &l.lists, &a);
                          },
                          [&](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) {
                            const PerTensor param_norms(per_tensor_param_norm, l, "per_tensor_param_norm");
                            const PerTensor update_norms(per_tensor_update_norm, l, "per_tensor_update_norm");
                            call_reference<decltype(multi_tensor_lamb_stage2)>(
                                "multi_tensor_lamb_stage2", t[0], t[1], param_norms.bucket(), update_norms.bucket(), lr,
                                weight_decay, use_nvlamb);
                          }};
  run_once(op, {"params", "updates"}, 0b01, {params, updates});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_lamb_stage2)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_lamb_stage2, m) {
  namespace py = pybind11;
  m.def(
      "multi_tensor_lamb_stage2",
      [](const std::vector<std::vector<at::Tensor>>& lists, const at::Tensor& per_tensor_param_norm,
         const at::Tensor& per_tensor_update_norm, double lr, double weight_decay, bool use_nvlamb) {
        apex::check_lists("multi_tensor_lamb_stage2", lists, 2);
        apex::multi_tensor_lamb_stage2(lists[0], lists[1], per_tensor_param_norm, per_tensor_update_norm, lr,
                                       weight_decay, use_nvlamb);
      },
      py::arg("tensor_lists"), py::arg("per_tensor_param_norm"), py::arg("per_tensor_update_norm"), py::arg("lr"),
      py::arg("weight_decay"), py::arg("use_nvlamb") = false, py::call_guard<py::gil_scoped_release>());
}
#endif
