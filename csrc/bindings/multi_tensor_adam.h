#pragma once
#include "host/multi_tensor_adam.h"

#include "optimizer_plan.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"
#include "zeroed_counters.h"

namespace apex {
void multi_tensor_adam(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                       at::TensorList model_params, double lr, double beta1, double beta2, double eps, int64_t step,
                       int64_t decay_mode, bool bias_correction, double weight_decay,
                       const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& step_tensor,
                       bool advance_step, const std::optional<at::Tensor>& inv_scale,
                       const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& noop_flag,
                       bool unscale_grads);

// Everything but the tensors: checked once, given to every launch and to the reference.
struct AdamCall {
  double lr, beta1, beta2, eps;
  int64_t step, decay_mode;
  bool bias_correction;
  double weight_decay;
  std::optional<at::Tensor> lr_tensor, step_tensor;
  bool advance_step;
  std::optional<at::Tensor> inv_scale, found_inf, noop_flag;
  bool unscale_grads = false;

  bool unscales() const { return unscale_grads && inv_scale; }
  void check(const char* op = "multi_tensor_adam") const {
    TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, op, ": betas must lie in [0, 1), not ", beta1,
                      " and ", beta2);
    TORCH_CHECK_VALUE(decay_mode == 0 || decay_mode == 1, op, ": decay_mode is 0 (L2) or 1 (decoupled), not ",
                      decay_mode);
    TORCH_CHECK_VALUE(step_tensor || !bias_correction || (step >= 1 && step <= INT32_MAX), op,
                      ": step counts from 1, not ", step);
  }
  // `last`: the step is advanced by the last launch alone, after every other has read it.
  gpu::AdamArguments arguments(const TensorPlan::Launch& l, const ZeroedCounters& counter) const {
    gpu::AdamArguments a{};
    a.lr = lr;
    a.beta1 = beta1;
    a.beta2 = beta2;
    a.eps = eps;
    a.weight_decay = weight_decay;
    a.step = int32_t(step);
    a.mode = int32_t(decay_mode);
    a.bias_correction = bias_correction;
    a.step_offset = advance_step;
    a.advance_step = advance_step && l.last;
    a.unscale_grads = unscales();
    a.lr_on_device = scalar_pointer<const float>(lr_tensor, "lr_tensor", l.device);
    a.step_on_device = scalar_pointer<int32_t>(step_tensor, "step_tensor", l.device);
    a.blocks_done = counter.data();
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", l.device);
    a.noop_flag = scalar_pointer<const int32_t>(noop_flag, "noop_flag", l.device);
    return a;
  }
  void reference(const TensorPlan::Tensors& t, bool last) const {
    const std::vector<at::Tensor> none;
    // Only the last bucket's reference advances the step; the others count one ahead themselves.
    auto steps = step_tensor;
    if (steps && advance_step && !last) steps = steps->add(1);
    call_reference<decltype(multi_tensor_adam)>("multi_tensor_adam", t[0], t[1], t[2], t[3], t.size() > 4 ? t[4] : none,
                                                lr, beta1, beta2, eps, step, decay_mode, bias_correction, weight_decay,
                                                lr_tensor, steps, advance_step && last, inv_scale, found_inf, noop_flag,
                                                unscale_grads);
  }

  // What a kernel (no other variant has a table) counts its blocks with where it advances the step.
  ZeroedCounters counter(const TensorPlan::Launch& l) const {
    if (!advance_step || !l.last || !l.lists.table) return {};
    return {l.place, l.device, 1, l.capturing};
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_adam", 0,
            [this](const TensorPlan::Launch& l) {
              const ZeroedCounters blocks_done = counter(l);
              const gpu::AdamArguments a = arguments(l, blocks_done);
              return apex_multi_tensor_adam(&l.place, &l.lists, &a);
            },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) { reference(t, l.last); }, unscales()};
  }
};

inline void multi_tensor_adam(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs,
                              at::TensorList exp_avg_sqs, at::TensorList model_params, double lr, double beta1,
                              double beta2, double eps, int64_t step, int64_t decay_mode, bool bias_correction,
                              double weight_decay, const std::optional<at::Tensor>& lr_tensor,
                              const std::optional<at::Tensor>& step_tensor, bool advance_step,
                              const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                              const std::optional<at::Tensor>& noop_flag, bool unscale_grads) {
  const AdamCall call{lr,           beta1,           beta2,        eps,       step,
                      decay_mode,   bias_correction, weight_decay, lr_tensor, step_tensor,
                      advance_step, inv_scale,       found_inf,    noop_flag, unscale_grads};
  call.check();
  std::vector<std::string> names = {"grads", "params", "exp_avgs", "exp_avg_sqs"};
  std::vector<at::TensorList> lists = {grads, params, exp_avgs, exp_avg_sqs};
  if (!model_params.empty()) {
    names.push_back("model_params");
    lists.push_back(model_params);
  }
  run_once(call.op(), names, 0b11110, lists);
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_adam)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_adam, m) {
  namespace py = pybind11;
  m.def(
      "multi_tensor_adam",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::AdamCall& call) {
        TORCH_CHECK_VALUE(
            lists.size() == 4 || lists.size() == 5,
            "multi_tensor_adam: 4 or 5 tensor lists (gradients, parameters, exp_avgs, exp_avg_sqs[, model "
            "parameters]) are required, not ",
            lists.size());
        const std::vector<at::Tensor> none;
        apex::multi_tensor_adam(lists[0], lists[1], lists[2], lists[3], lists.size() > 4 ? lists[4] : none, call.lr,
                                call.beta1, call.beta2, call.eps, call.step, call.decay_mode, call.bias_correction,
                                call.weight_decay, call.lr_tensor, call.step_tensor, call.advance_step, call.inv_scale,
                                call.found_inf, call.noop_flag, call.unscale_grads);
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_adam_step",
      [](apex::OptimizerPlan& plan, const apex::AdamCall& call) {
        call.check();
        plan.run(call.op());
      },
      py::arg("plan"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  py::class_<apex::AdamCall>(m, "multi_tensor_adam_call")
      .def(py::init([](double lr, double beta1, double beta2, double eps, int64_t step, int64_t decay_mode,
                       bool bias_correction, double weight_decay, std::optional<at::Tensor> lr_tensor,
                       std::optional<at::Tensor> step_tensor, bool advance_step, std::optional<at::Tensor> inv_scale,
                       std::optional<at::Tensor> found_inf, std::optional<at::Tensor> noop_flag, bool unscale_grads) {
             return apex::AdamCall{lr,
                                   beta1,
                                   beta2,
                                   eps,
                                   step,
                                   decay_mode,
                                   bias_correction,
                                   weight_decay,
                                   std::move(lr_tensor),
                                   std::move(step_tensor),
                                   advance_step,
                                   std::move(inv_scale),
                                   std::move(found_inf),
                                   std::move(noop_flag),
                                   unscale_grads};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("step"),
           py::arg("decay_mode"), py::arg("bias_correction"), py::arg("weight_decay"),
           py::arg("lr_tensor") = std::nullopt, py::arg("step_tensor") = std::nullopt, py::arg("advance_step") = false,
           py::arg("inv_scale") = std::nullopt, py::arg("found_inf") = std::nullopt,
           py::arg("noop_flag") = std::nullopt, py::arg("unscale_grads") = false);
}
#endif
