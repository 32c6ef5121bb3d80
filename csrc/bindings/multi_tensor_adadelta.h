#pragma once
#include "host/multi_tensor_adadelta.h"

#include "optimizer_plan.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
void multi_tensor_adadelta(at::TensorList grads, at::TensorList params, at::TensorList square_avgs,
                           at::TensorList acc_deltas, double lr, double rho, double eps, double weight_decay,
                           const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& inv_scale,
                           const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& noop_flag);

// Everything but the tensor lists.
struct AdadeltaCall {
  double lr, rho, eps, weight_decay;
  std::optional<at::Tensor> lr_tensor, inv_scale, found_inf, noop_flag;

  int32_t launch(const TensorPlan::Launch& l) const {
    gpu::AdadeltaArguments a{};
    a.lr = lr;
    a.rho = rho;
    a.eps = eps;
    a.weight_decay = weight_decay;
    a.lr_on_device = scalar_pointer<const float>(lr_tensor, "lr_tensor", l.device);
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", l.device);
    a.noop_flag = scalar_pointer<const int32_t>(noop_flag, "noop_flag", l.device);
    return apex_multi_tensor_adadelta(&l.place, &l.lists, &a);
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_adadelta", 0, [this](const TensorPlan::Launch& l) { return launch(l); },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch&) {
              call_reference<decltype(multi_tensor_adadelta)>("multi_tensor_adadelta", t[0], t[1], t[2], t[3], lr, rho,
                                                              eps, weight_decay, lr_tensor, inv_scale, found_inf,
                                                              noop_flag);
            }};
  }
  void run_on(const std::vector<at::TensorList>& lists) const {
    run_once(op(), {"grads", "params", "square_avgs", "acc_deltas"}, 0b1110, lists);
  }
};

inline void multi_tensor_adadelta(at::TensorList grads, at::TensorList params, at::TensorList square_avgs,
                                  at::TensorList acc_deltas, double lr, double rho, double eps, double weight_decay,
                                  const std::optional<at::Tensor>& lr_tensor,
                                  const std::optional<at::Tensor>& inv_scale,
                                  const std::optional<at::Tensor>& found_inf,
                                  const std::optional<at::Tensor>& noop_flag) {
  const AdadeltaCall call{lr, rho, eps, weight_decay, lr_tensor, inv_scale, found_inf, noop_flag};
  call.run_on({grads, params, square_avgs, acc_deltas});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_adadelta)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_adadelta, m) {
  namespace py = pybind11;
  using Optional = std::optional<at::Tensor>;
  py::class_<apex::AdadeltaCall>(m, "multi_tensor_adadelta_call")
      .def(py::init([](double lr, double rho, double eps, double weight_decay, Optional lr_tensor, Optional inv_scale,
                       Optional found_inf, Optional noop_flag) {
             return apex::AdadeltaCall{lr,
                                       rho,
                                       eps,
                                       weight_decay,
                                       std::move(lr_tensor),
                                       std::move(inv_scale),
                                       std::move(found_inf),
                                       std::move(noop_flag)};
           }),
           py::kw_only(), py::arg("lr"), py::arg("rho"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("lr_tensor") = std::nullopt, py::arg("inv_scale") = std::nullopt,
           py::arg("found_inf") = std::nullopt, py::arg("noop_flag") = std::nullopt);
  m.def(
      "multi_tensor_adadelta",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::AdadeltaCall& call) {
        apex::check_lists("multi_tensor_adadelta", lists, 4);
        call.run_on({lists.begin(), lists.end()});
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_adadelta_step",
      [](apex::OptimizerPlan& plan, const apex::AdadeltaCall& call) { plan.run(call.op()); }, py::arg("plan"),
      py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
