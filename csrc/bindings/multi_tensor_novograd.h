#pragma once
#include "host/multi_tensor_novograd.h"

#include "optimizer_plan.h"
#include "per_tensor.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
void multi_tensor_novograd(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs,
                           const at::Tensor& grad_norms, double lr, double beta1, double beta2, double eps,
                           int64_t step, bool bias_correction, double weight_decay, bool grad_averaging,
                           int64_t moment_mode, int64_t norm_type, const std::optional<at::Tensor>& lr_tensor,
                           const std::optional<at::Tensor>& step_tensor, bool advance_step,
                           const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                           const std::optional<at::Tensor>& noop_flag, bool update_norms, bool unscale_grads);

// Everything but the tensor lists.
struct NovogradCall {
  at::Tensor grad_norms;
  double lr, beta1, beta2, eps;
  int64_t step;
  bool bias_correction;
  double weight_decay;
  bool grad_averaging;
  int64_t moment_mode, norm_type;
  std::optional<at::Tensor> lr_tensor, step_tensor;
  bool advance_step;
  std::optional<at::Tensor> inv_scale, found_inf, noop_flag;
  bool update_norms, unscale_grads;

  bool unscales() const { return unscale_grads && inv_scale; }
  void check() const {
    TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
                      "multi_tensor_novograd: betas must lie in [0, 1), not ", beta1, " and ", beta2);
    TORCH_CHECK_VALUE(moment_mode == 0 || moment_mode == 1,
                      "multi_tensor_novograd: moment_mode is 0 (decay inside the average) or 1 (decoupled), not ",
                      moment_mode);
    TORCH_CHECK_VALUE(norm_type == 0 || norm_type == 2,
                      "multi_tensor_novograd: norm_type is 2 (L2) or 0 (largest magnitude), not ", norm_type);
    TORCH_CHECK_VALUE(step_tensor || !bias_correction || (step >= 1 && step <= INT32_MAX),
                      "multi_tensor_novograd: step counts from 1, not ", step);
    TORCH_CHECK_VALUE(update_norms || !advance_step,
                      "multi_tensor_novograd: only a call that updates the norms advances the step");
  }
  int32_t launch(const TensorPlan::Launch& l) const {
    gpu::NovogradArguments a{};
    a.lr = lr;
    a.beta1 = beta1;
    a.beta2 = beta2;
    a.one_minus_beta2 = 1.0 - beta2;
    a.eps = eps;
    a.weight_decay = weight_decay;
    a.step = int32_t(step);
    a.moment_mode = int32_t(moment_mode);
    a.bias_correction = bias_correction;
    a.grad_averaging = grad_averaging;
    a.step_offset = advance_step;
    a.advance_step = advance_step && l.last;
    a.unscale_grads = unscales();
    a.lr_on_device = scalar_pointer<const float>(lr_tensor, "lr_tensor", l.device);
    a.step_on_device = scalar_pointer<int32_t>(step_tensor, "step_tensor", l.device);
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", l.device);
    a.noop_flag = scalar_pointer<const int32_t>(noop_flag, "noop_flag", l.device);
    PerTensor norms(grad_norms, l, "grad_norms");
    a.grad_norms = norms.pointer_to_write();
    const int32_t status = apex_multi_tensor_novograd(&l.place, &l.lists, &a, norm_type == 0, update_norms);
    norms.write_back();
    return status;
  }
  void reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
    PerTensor norms(grad_norms, l, "grad_norms");
    auto steps = step_tensor;  // only the last bucket's reference advances it; the others count one ahead themselves
    if (steps && advance_step && !l.last) steps = steps->add(1);
    call_reference<decltype(multi_tensor_novograd)>(
        "multi_tensor_novograd", t[0], t[1], t[2], norms.bucket(), lr, beta1, beta2, eps, step, bias_correction,
        weight_decay, grad_averaging, moment_mode, norm_type, lr_tensor, steps, advance_step && l.last, inv_scale,
        found_inf, noop_flag, update_norms, unscale_grads);
    norms.write_back();
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_novograd", 1, [this](const TensorPlan::Launch& l) { return launch(l); },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) { reference(t, l); }, unscales()};
  }
  void run_on(const std::vector<at::TensorList>& lists) const {
    check();
    run_once(op(), {"grads", "params", "exp_avgs"}, 0b110, lists);
  }
};

inline void multi_tensor_novograd(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs,
                                  const at::Tensor& grad_norms, double lr, double beta1, double beta2, double eps,
                                  int64_t step, bool bias_correction, double weight_decay, bool grad_averaging,
                                  int64_t moment_mode, int64_t norm_type, const std::optional<at::Tensor>& lr_tensor,
                                  const std::optional<at::Tensor>& step_tensor, bool advance_step,
                                  const std::optional<at::Tensor>& inv_scale,
                                  const std::optional<at::Tensor>& found_inf,
                                  const std::optional<at::Tensor>& noop_flag, bool update_norms, bool unscale_grads) {
  const NovogradCall call{grad_norms,      lr,           beta1,          beta2,       eps,       step,
                          bias_correction, weight_decay, grad_averaging, moment_mode, norm_type, lr_tensor,
                          step_tensor,     advance_step, inv_scale,      found_inf,   noop_flag, update_norms,
                          unscale_grads};
  call.run_on({grads, params, exp_avgs});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_novograd)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_novograd, m) {
  namespace py = pybind11;
  using Optional = std::optional<at::Tensor>;
  py::class_<apex::NovogradCall>(m, "multi_tensor_novograd_call")
      .def(py::init([](at::Tensor grad_norms, double lr, double beta1, double beta2, double eps, int64_t step,
                       bool bias_correction, double weight_decay, bool grad_averaging, int64_t moment_mode,
                       int64_t norm_type, Optional lr_tensor, Optional step_tensor, bool advance_step,
                       Optional inv_scale, Optional found_inf, Optional noop_flag, bool update_norms,
                       bool unscale_grads) {
             return apex::NovogradCall{std::move(grad_norms),
                                       lr,
                                       beta1,
                                       beta2,
                                       eps,
                                       step,
                                       bias_correction,
                                       weight_decay,
                                       grad_averaging,
                                       moment_mode,
                                       norm_type,
                                       std::move(lr_tensor),
                                       std::move(step_tensor),
                                       advance_step,
                                       std::move(inv_scale),
                                       std::move(found_inf),
                                       std::move(noop_flag),
                                       update_norms,
                                       unscale_grads};
           }),
           py::kw_only(), py::arg("grad_norms"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("step"), py::arg("bias_correction"), py::arg("weight_decay"), py::arg("grad_averaging"),
           py::arg("moment_mode"), py::arg("norm_type"), py::arg("lr_tensor") = std::nullopt,
           py::arg("step_tensor") = std::nullopt, py::arg("advance_step") = false, py::arg("inv_scale") = std::nullopt,
           py::arg("found_inf") = std::nullopt, py::arg("noop_flag") = std::nullopt, py::arg("update_norms") = true,
           py::arg("unscale_grads") = false);
  m.def(
      "multi_tensor_novograd",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::NovogradCall& call) {
        apex::check_lists("multi_tensor_novograd", lists, 3);
        call.run_on({lists.begin(), lists.end()});
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_novograd_step",
      [](apex::OptimizerPlan& plan, const apex::NovogradCall& call) {
        call.check();
        plan.run(call.op());
      },
      py::arg("plan"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
