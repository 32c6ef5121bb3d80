#pragma once
#include "host/multi_tensor_amsgrad.h"

#include "multi_tensor_adam.h"

namespace apex {
void multi_tensor_amsgrad(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs,
                          at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, double lr, double beta1,
                          double beta2, double eps, int64_t step, int64_t decay_mode, bool bias_correction,
                          double weight_decay, const std::optional<at::Tensor>& lr_tensor,
                          const std::optional<at::Tensor>& step_tensor, bool advance_step,
                          const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                          const std::optional<at::Tensor>& noop_flag);

// Adam's scalars, over one more list.
struct AmsgradCall : AdamCall {
  void reference(const TensorPlan::Tensors& t, bool last) const {
    auto steps = step_tensor;
    if (steps && advance_step && !last) steps = steps->add(1);
    call_reference<decltype(multi_tensor_amsgrad)>(
        "multi_tensor_amsgrad", t[0], t[1], t[2], t[3], t[4], lr, beta1, beta2, eps, step, decay_mode, bias_correction,
        weight_decay, lr_tensor, steps, advance_step && last, inv_scale, found_inf, noop_flag);
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_amsgrad", 0,
            [this](const TensorPlan::Launch& l) {
              const ZeroedCounters blocks_done = counter(l);
              const gpu::AdamArguments a = arguments(l, blocks_done);
              return apex_multi_tensor_amsgrad(&l.place, &l.lists, &a);
            },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) { reference(t, l.last); }};
  }
  void run_on(const std::vector<at::TensorList>& lists) const {
    check("multi_tensor_amsgrad");
    run_once(op(), {"grads", "params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"}, 0b11110, lists);
  }
};

inline void multi_tensor_amsgrad(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs,
                                 at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, double lr, double beta1,
                                 double beta2, double eps, int64_t step, int64_t decay_mode, bool bias_correction,
                                 double weight_decay, const std::optional<at::Tensor>& lr_tensor,
                                 const std::optional<at::Tensor>& step_tensor, bool advance_step,
                                 const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                                 const std::optional<at::Tensor>& noop_flag) {
  const AmsgradCall call{{lr, beta1, beta2, eps, step, decay_mode, bias_correction, weight_decay, lr_tensor,
                          step_tensor, advance_step, inv_scale, found_inf, noop_flag}};
  call.run_on({grads, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_amsgrad)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_amsgrad, m) {
  namespace py = pybind11;
  using Optional = std::optional<at::Tensor>;
  py::class_<apex::AmsgradCall>(m, "multi_tensor_amsgrad_call")
      .def(py::init([](double lr, double beta1, double beta2, double eps, int64_t step, int64_t decay_mode,
                       bool bias_correction, double weight_decay, Optional lr_tensor, Optional step_tensor,
                       bool advance_step, Optional inv_scale, Optional found_inf, Optional noop_flag) {
             return apex::AmsgradCall{{lr, beta1, beta2, eps, step, decay_mode, bias_correction, weight_decay,
                                       std::move(lr_tensor), std::move(step_tensor), advance_step, std::move(inv_scale),
                                       std::move(found_inf), std::move(noop_flag)}};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("step"),
           py::arg("decay_mode"), py::arg("bias_correction"), py::arg("weight_decay"),
           py::arg("lr_tensor") = std::nullopt, py::arg("step_tensor") = std::nullopt, py::arg("advance_step") = false,
           py::arg("inv_scale") = std::nullopt, py::arg("found_inf") = std::nullopt,
           py::arg("noop_flag") = std::nullopt);
  m.def(
      "multi_tensor_amsgrad",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::AmsgradCall& call) {
        apex::check_lists("multi_tensor_amsgrad", lists, 5);
        call.run_on({lists.begin(), lists.end()});
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_amsgrad_step",
      [](apex::OptimizerPlan& plan, const apex::AmsgradCall& call) {
        call.check("multi_tensor_amsgrad");
        plan.run(call.op());
      },
      py::arg("plan"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
