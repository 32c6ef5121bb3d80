#pragma once
#include "host/multi_tensor_adagrad.h"

#include "optimizer_plan.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
void multi_tensor_adagrad(at::TensorList grads, at::TensorList params, at::TensorList sums, double lr, double eps,
                          int64_t decay_mode, double weight_decay, const std::optional<at::Tensor>& lr_tensor,
                          const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                          const std::optional<at::Tensor>& noop_flag, bool unscale_grads);

// Everything but the tensor lists.
struct AdagradCall {
  double lr, eps;
  int64_t decay_mode;
  double weight_decay;
  std::optional<at::Tensor> lr_tensor, inv_scale, found_inf, noop_flag;
  bool unscale_grads;

  bool unscales() const { return unscale_grads && inv_scale; }
  void check() const {
    TORCH_CHECK_VALUE(decay_mode == 0 || decay_mode == 1,
                      "multi_tensor_adagrad: decay_mode is 0 (L2) or 1 (decoupled), not ", decay_mode);
  }
  int32_t launch(const TensorPlan::Launch& l) const {
    gpu::AdagradArguments a{};
    a.lr = lr;
    a.eps = eps;
    a.weight_decay = weight_decay;
    a.mode = int32_t(decay_mode);
    a.unscale_grads = unscales();
    a.lr_on_device = scalar_pointer<const float>(lr_tensor, "lr_tensor", l.device);
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", l.device);
    a.noop_flag = scalar_pointer<const int32_t>(noop_flag, "noop_flag", l.device);
    return apex_multi_tensor_adagrad(&l.place, &l.lists, &a);
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_adagrad", 0, [this](const TensorPlan::Launch& l) { return launch(l); },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch&) {
              call_reference<decltype(multi_tensor_adagrad)>("multi_tensor_adagrad", t[0], t[1], t[2], lr, eps,
                                                             decay_mode, weight_decay, lr_tensor, inv_scale, found_inf,
                                                             noop_flag, unscale_grads);
            },
            unscales()};
  }
  void run_on(const std::vector<at::TensorList>& lists) const {
    check();
    run_once(op(), {"grads", "params", "sums"}, 0b110, lists);
  }
};

inline void multi_tensor_adagrad(at::TensorList grads, at::TensorList params, at::TensorList sums, double lr,
                                 double eps, int64_t decay_mode, double weight_decay,
                                 const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& inv_scale,
                                 const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& noop_flag,
                                 bool unscale_grads) {
  const AdagradCall call{lr, eps, decay_mode, weight_decay, lr_tensor, inv_scale, found_inf, noop_flag, unscale_grads};
  call.run_on({grads, params, sums});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_adagrad)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_adagrad, m) {
  namespace py = pybind11;
  using Optional = std::optional<at::Tensor>;
  py::class_<apex::AdagradCall>(m, "multi_tensor_adagrad_call")
      .def(py::init([](double lr, double eps, int64_t decay_mode, double weight_decay, Optional lr_tensor,
                       Optional inv_scale, Optional found_inf, Optional noop_flag, bool unscale_grads) {
             return apex::AdagradCall{lr,
                                      eps,
                                      decay_mode,
                                      weight_decay,
                                      std::move(lr_tensor),
                                      std::move(inv_scale),
                                      std::move(found_inf),
                                      std::move(noop_flag),
                                      unscale_grads};
           }),
           py::kw_only(), py::arg("lr"), py::arg("eps"), py::arg("decay_mode"), py::arg("weight_decay"),
           py::arg("lr_tensor") = std::nullopt, py::arg("inv_scale") = std::nullopt,
           py::arg("found_inf") = std::nullopt, py::arg("noop_flag") = std::nullopt, py::arg("unscale_grads") = false);
  m.def(
      "multi_tensor_adagrad",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::AdagradCall& call) {
        apex::check_lists("multi_tensor_adagrad", lists, 3);
        call.run_on({lists.begin(), lists.end()});
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_adagrad_step",
      [](apex::OptimizerPlan& plan, const apex::AdagradCall& call) {
        call.check();
        plan.run(call.op());
      },
      py::arg("plan"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
