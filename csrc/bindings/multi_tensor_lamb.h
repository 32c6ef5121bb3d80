#pragma once
#include "host/multi_tensor_lamb.h"

#include "optimizer_plan.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
void multi_tensor_lamb(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                       at::TensorList model_params, double lr, double beta1, double beta2, double eps, int64_t step,
                       bool bias_correction, double weight_decay, bool grad_averaging, int64_t decay_mode,
                       const std::optional<at::Tensor>& global_grad_norm, double max_grad_norm, bool use_nvlamb,
                       const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& step_tensor,
                       bool advance_step, const std::optional<at::Tensor>& max_grad_norm_tensor,
                       const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                       const std::optional<at::Tensor>& noop_flag, double max_param_norm);

// Everything but the tensor lists.
struct LambCall {
  double lr, beta1, beta2, eps;
  int64_t step;
  bool bias_correction;
  double weight_decay;
  bool grad_averaging;
  int64_t decay_mode;
  std::optional<at::Tensor> global_grad_norm;
  double max_grad_norm;
  bool use_nvlamb;
  std::optional<at::Tensor> lr_tensor, step_tensor;
  bool advance_step;
  std::optional<at::Tensor> max_grad_norm_tensor, inv_scale, found_inf, noop_flag;
  double max_param_norm;

  void check() const {
    TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
                      "multi_tensor_lamb: betas must lie in [0, 1), not ", beta1, " and ", beta2);
    TORCH_CHECK_VALUE(decay_mode == 0 || decay_mode == 1,
                      "multi_tensor_lamb: decay_mode is 0 (L2) or 1 (decoupled), not ", decay_mode);
    TORCH_CHECK_VALUE(step_tensor || !bias_correction || (step >= 1 && step <= INT32_MAX),
                      "multi_tensor_lamb: step counts from 1, not ", step);
  }
  // The norm of all gradients was measured on one device; a group may have parameters on others.
  std::optional<at::Tensor> norm_on(c10::Device device) const {
    const bool elsewhere = global_grad_norm && global_grad_norm->defined() && global_grad_norm->device() != device;
    return elsewhere ? global_grad_norm->to(device, /*non_blocking=*/true) : global_grad_norm;
  }
  int32_t launch(const TensorPlan::Launch& l) const {
    const std::optional<at::Tensor> norm = norm_on(l.device);
    gpu::LambArguments a{};
    a.lr = lr;
    a.beta1 = beta1;
    a.beta2 = beta2;
    a.eps = eps;
    a.weight_decay = weight_decay;
    a.max_grad_norm = max_grad_norm;
    a.max_param_norm = max_param_norm;
    a.step = int32_t(step);
    a.mode = int32_t(decay_mode);
    a.bias_correction = bias_correction;
    a.grad_averaging = grad_averaging;
    a.use_nvlamb = use_nvlamb;
    a.step_offset = advance_step;
    a.advance_step = advance_step && l.last;
    a.lr_on_device = scalar_pointer<const float>(lr_tensor, "lr_tensor", l.device);
    a.step_on_device = scalar_pointer<int32_t>(step_tensor, "step_tensor", l.device);
    a.global_grad_norm = scalar_pointer<const float>(norm, "global_grad_norm", l.device);
    a.max_grad_norm_on_device = scalar_pointer<const float>(max_grad_norm_tensor, "max_grad_norm_tensor", l.device);
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", l.device);
    a.noop_flag = scalar_pointer<const int32_t>(noop_flag, "noop_flag", l.device);
    return apex_multi_tensor_lamb(&l.place, &l.lists, &a);
  }
  void reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
    const bool last = l.last;
    const std::vector<at::Tensor> none;
    auto steps = step_tensor;
    if (steps && advance_step && !last) steps = steps->add(1);
    call_reference<decltype(multi_tensor_lamb)>(
        "multi_tensor_lamb", t[0], t[1], t[2], t[3], t.size() > 4 ? t[4] : none, lr, beta1, beta2, eps, step,
        bias_correction, weight_decay, grad_averaging, decay_mode, norm_on(l.device), max_grad_norm, use_nvlamb,
        lr_tensor, steps, advance_step && last, max_grad_norm_tensor, inv_scale, found_inf, noop_flag, max_param_norm);
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_lamb", 2, [this](const TensorPlan::Launch& l) { return launch(l); },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) { reference(t, l); }};
  }
  void run_on(const std::vector<at::TensorList>& lists) const {
    check();
    std::vector<std::string> names = {"grads", "params", "exp_avgs", "exp_avg_sqs"};
    if (lists.size() > 4) names.push_back("model_params");
    run_once(op(), names, 0b11111, lists);
  }
};

inline void multi_tensor_lamb(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs,
                              at::TensorList exp_avg_sqs, at::TensorList model_params, double lr, double beta1,
                              double beta2, double eps, int64_t step, bool bias_correction, double weight_decay,
                              bool grad_averaging, int64_t decay_mode,
                              const std::optional<at::Tensor>& global_grad_norm, double max_grad_norm, bool use_nvlamb,
                              const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& step_tensor,
                              bool advance_step, const std::optional<at::Tensor>& max_grad_norm_tensor,
                              const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                              const std::optional<at::Tensor>& noop_flag, double max_param_norm) {
  const LambCall call{lr,
                      beta1,
                      beta2,
                      eps,
                      step,
                      bias_correction,
                      weight_decay,
                      grad_averaging,
                      decay_mode,
                      global_grad_norm,
                      max_grad_norm,
                      use_nvlamb,
                      lr_tensor,
                      step_tensor,
                      advance_step,
                      max_grad_norm_tensor,
                      inv_scale,
                      found_inf,
                      noop_flag,
                      max_param_norm};
  std::vector<at::TensorList> lists = {grads, params, exp_avgs, exp_avg_sqs};
  if (!model_params.empty()) lists.push_back(model_params);
  call.run_on(lists);
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_lamb)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_lamb, m) {
  namespace py = pybind11;
  using Optional = std::optional<at::Tensor>;
  py::class_<apex::LambCall>(m, "multi_tensor_lamb_call")
      .def(py::init([](double lr, double beta1, double beta2, double eps, int64_t step, bool bias_correction,
                       double weight_decay, bool grad_averaging, int64_t decay_mode, Optional global_grad_norm,
                       double max_grad_norm, bool use_nvlamb, Optional lr_tensor, Optional step_tensor,
                       bool advance_step, Optional max_grad_norm_tensor, Optional inv_scale, Optional found_inf,
                       Optional noop_flag, double max_param_norm) {
             return apex::LambCall{lr,
                                   beta1,
                                   beta2,
                                   eps,
                                   step,
                                   bias_correction,
                                   weight_decay,
                                   grad_averaging,
                                   decay_mode,
                                   std::move(global_grad_norm),
                                   max_grad_norm,
                                   use_nvlamb,
                                   std::move(lr_tensor),
                                   std::move(step_tensor),
                                   advance_step,
                                   std::move(max_grad_norm_tensor),
                                   std::move(inv_scale),
                                   std::move(found_inf),
                                   std::move(noop_flag),
                                   max_param_norm};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("step"),
           py::arg("bias_correction"), py::arg("weight_decay"), py::arg("grad_averaging"), py::arg("decay_mode"),
           py::arg("global_grad_norm"), py::arg("max_grad_norm"), py::arg("use_nvlamb") = false,
           py::arg("lr_tensor") = std::nullopt, py::arg("step_tensor") = std::nullopt, py::arg("advance_step") = false,
           py::arg("max_grad_norm_tensor") = std::nullopt, py::arg("inv_scale") = std::nullopt,
           py::arg("found_inf") = std::nullopt, py::arg("noop_flag") = std::nullopt, py::arg("max_param_norm") = 0.0);
  m.def(
      "multi_tensor_lamb",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::LambCall& call) {
        TORCH_CHECK_VALUE(
            lists.size() == 4 || lists.size() == 5,
            "multi_tensor_lamb: 4 or 5 tensor lists (gradients, parameters, exp_avgs, exp_avg_sqs[, model "
            "parameters]) are required, not ",
            lists.size());
        call.run_on({lists.begin(), lists.end()});
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_lamb_step",
      [](apex::OptimizerPlan& plan, const apex::LambCall& call) {
        call.check();
        plan.run(call.op());
      },
      py::arg("plan"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
