#pragma once
#include "host/multi_tensor_lamb_stage1.h"

#include "per_tensor.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
inline void multi_tensor_lamb_stage1(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs,
                                     at::TensorList exp_avg_sqs, at::TensorList updates,
                                     const at::Tensor& per_tensor_decay, int64_t step, double beta1, double beta2,
                                     double eps, const at::Tensor& global_grad_norm, double max_global_grad_norm) {
  TORCH_CHECK_VALUE(step >= 1 && step <= INT32_MAX, "multi_tensor_lamb_stage1: step counts from 1, not ", step);
  const TensorPlan::Op op{"multi_tensor_lamb_stage1", 0,
                          [&](const TensorPlan::Launch& l) {
                            gpu::LambArguments a{};
                            a.beta1 = beta1;
                            a.beta2 = beta2;
                            a.eps = eps;
                            a.step = int32_t(step);
                            a.mode = gpu::lamb_decoupled;
                            a.bias_correction = a.grad_averaging = 1;
                            a.max_grad_norm = max_global_grad_norm;
                            a.global_grad_norm =
                                scalar_pointer<const float>(global_grad_norm, "global_grad_norm", l.device);
                            const PerTensor decays(per_tensor_decay, l, "per_tensor_decay");
                            a.per_tensor_decay = decays.pointer();
                            return apex_multi_tensor_lamb_stage1(&l.place, &l.lists, &a);
                          },
                          [&](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) {
                            const PerTensor decays(per_tensor_decay, l, "per_tensor_decay");
                            call_reference<decltype(multi_tensor_lamb_stage1)>(
                                "multi_tensor_lamb_stage1", t[0], t[1], t[2], t[3], t[4], decays.bucket(), step, beta1,
                                beta2, eps, global_grad_norm, max_global_grad_norm);
                          }};
  run_once(op, {"grads", "params", "exp_avgs", "exp_avg_sqs", "updates"}, 0b11100,
           {grads, params, exp_avgs, exp_avg_sqs, updates});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_lamb_stage1)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_lamb_stage1, m) {
  namespace py = pybind11;
  m.def(
      "multi_tensor_lamb_stage1",
      [](const std::vector<std::vector<at::Tensor>>& lists, const at::Tensor& per_tensor_decay, int64_t step,
         double beta1, double beta2, double eps, const at::Tensor& global_grad_norm, double max_global_grad_norm) {
        apex::check_lists("multi_tensor_lamb_stage1", lists, 5);
        apex::multi_tensor_lamb_stage1(lists[0], lists[1], lists[2], lists[3], lists[4], per_tensor_decay, step, beta1,
                                       beta2, eps, global_grad_norm, max_global_grad_norm);
      },
      py::arg("tensor_lists"), py::arg("per_tensor_decay"), py::arg("step"), py::arg("beta1"), py::arg("beta2"),
      py::arg("eps"), py::arg("global_grad_norm"), py::arg("max_global_grad_norm"),
      py::call_guard<py::gil_scoped_release>());
}
#endif
