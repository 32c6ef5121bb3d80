#pragma once
#include "host/multi_tensor_lars.h"

#include "optimizer_plan.h"
#include "per_tensor.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
void multi_tensor_lars(at::TensorList grads, at::TensorList params, at::TensorList momentums,
                       at::TensorList model_params, double lr, double trust_coefficient, double eps,
                       double weight_decay, double momentum, bool nesterov, bool is_skipped, double scale,
                       const std::optional<at::Tensor>& grad_norms, const std::optional<at::Tensor>& param_norms,
                       const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& inv_scale,
                       const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& noop_flag,
                       bool unscale_grads);

// Everything but the tensor lists.
struct LarsCall {
  double lr, trust_coefficient, eps, weight_decay, momentum;
  bool nesterov, is_skipped;
  double scale;
  std::optional<at::Tensor> grad_norms, param_norms, lr_tensor, inv_scale, found_inf, noop_flag;
  bool unscale_grads;

  bool unscales() const { return unscale_grads && inv_scale; }
  void check() const {
    TORCH_CHECK_VALUE(bool(grad_norms) == bool(param_norms),
                      "multi_tensor_lars: norms of gradients and parameters go together");
  }
  int32_t launch(const TensorPlan::Launch& l) const {
    gpu::LarsArguments a{};
    a.lr = lr;
    a.trust_coefficient = trust_coefficient;
    a.eps = eps;
    a.weight_decay = weight_decay;
    a.momentum = momentum;
    a.scale = scale;
    a.nesterov = nesterov;
    a.is_skipped = is_skipped;
    a.unscale_grads = unscales();
    a.lr_on_device = scalar_pointer<const float>(lr_tensor, "lr_tensor", l.device);
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", l.device);
    a.noop_flag = scalar_pointer<const int32_t>(noop_flag, "noop_flag", l.device);
    const PerTensor of_gradients(grad_norms, l, "grad_norms"), of_parameters(param_norms, l, "param_norms");
    a.grad_norms = of_gradients.pointer();
    a.param_norms = of_parameters.pointer();
    return apex_multi_tensor_lars(&l.place, &l.lists, &a);
  }
  void reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
    const std::vector<at::Tensor> none;
    const PerTensor of_gradients(grad_norms, l, "grad_norms"), of_parameters(param_norms, l, "param_norms");
    call_reference<decltype(multi_tensor_lars)>("multi_tensor_lars", t[0], t[1], t[2], t.size() > 3 ? t[3] : none, lr,
                                                trust_coefficient, eps, weight_decay, momentum, nesterov, is_skipped,
                                                scale, of_gradients.bucket_if_any(), of_parameters.bucket_if_any(),
                                                lr_tensor, inv_scale, found_inf, noop_flag, unscale_grads);
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_lars", 2, [this](const TensorPlan::Launch& l) { return launch(l); },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) { reference(t, l); }, unscales()};
  }
  void run_on(const std::vector<at::TensorList>& lists) const {
    check();
    std::vector<std::string> names = {"grads", "params", "momentums"};
    if (lists.size() > 3) names.push_back("model_params");
    run_once(op(), names, 0b1110, lists);
  }
};

inline void multi_tensor_lars(at::TensorList grads, at::TensorList params, at::TensorList momentums,
                              at::TensorList model_params, double lr, double trust_coefficient, double eps,
                              double weight_decay, double momentum, bool nesterov, bool is_skipped, double scale,
                              const std::optional<at::Tensor>& grad_norms, const std::optional<at::Tensor>& param_norms,
                              const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& inv_scale,
                              const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& noop_flag,
                              bool unscale_grads) {
  const LarsCall call{lr,         trust_coefficient, eps,       weight_decay, momentum,  nesterov,  is_skipped,   scale,
                      grad_norms, param_norms,       lr_tensor, inv_scale,    found_inf, noop_flag, unscale_grads};
  std::vector<at::TensorList> lists = {grads, params, momentums};
  if (!model_params.empty()) lists.push_back(model_params);
  call.run_on(lists);
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_lars)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_lars, m) {
  namespace py = pybind11;
  using Optional = std::optional<at::Tensor>;
  py::class_<apex::LarsCall>(m, "multi_tensor_lars_call")
      .def(py::init([](double lr, double trust_coefficient, double eps, double weight_decay, double momentum,
                       bool nesterov, bool is_skipped, double scale, Optional grad_norms, Optional param_norms,
                       Optional lr_tensor, Optional inv_scale, Optional found_inf, Optional noop_flag,
                       bool unscale_grads) {
             return apex::LarsCall{lr,
                                   trust_coefficient,
                                   eps,
                                   weight_decay,
                                   momentum,
                                   nesterov,
                                   is_skipped,
                                   scale,
                                   std::move(grad_norms),
                                   std::move(param_norms),
                                   std::move(lr_tensor),
                                   std::move(inv_scale),
                                   std::move(found_inf),
                                   std::move(noop_flag),
                                   unscale_grads};
           }),
           py::kw_only(), py::arg("lr"), py::arg("trust_coefficient"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("momentum"), py::arg("nesterov"), py::arg("is_skipped"), py::arg("scale") = 1.0,
           py::arg("grad_norms") = std::nullopt, py::arg("param_norms") = std::nullopt,
           py::arg("lr_tensor") = std::nullopt, py::arg("inv_scale") = std::nullopt,
           py::arg("found_inf") = std::nullopt, py::arg("noop_flag") = std::nullopt, py::arg("unscale_grads") = false);
  m.def(
      "multi_tensor_lars",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::LarsCall& call) {
        TORCH_CHECK_VALUE(lists.size() == 3 || lists.size() == 4,
                          "multi_tensor_lars: 3 or 4 tensor lists (gradients, parameters, momentum buffers[, model "
                          "parameters]) are required, not ",
                          lists.size());
        call.run_on({lists.begin(), lists.end()});
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_lars_step",
      [](apex::OptimizerPlan& plan, const apex::LarsCall& call) {
        call.check();
        plan.run(call.op());
      },
      py::arg("plan"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
