#pragma once
#include "host/multi_tensor_rmsprop.h"

#include "optimizer_plan.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
void multi_tensor_rmsprop(at::TensorList grads, at::TensorList params, at::TensorList square_avgs,
                          at::TensorList grad_avgs, at::TensorList momentums, double lr, double alpha, double eps,
                          double weight_decay, double momentum, bool eps_inside, bool decoupled_decay,
                          bool lr_in_momentum, const std::optional<at::Tensor>& lr_tensor,
                          const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                          const std::optional<at::Tensor>& noop_flag);

// Everything but the tensor lists. Momentum buffers are there where momentum is not 0, so that the number of lists
// tells whether averages of gradients are.
struct RmspropCall {
  double lr, alpha, eps, weight_decay, momentum;
  bool eps_inside, decoupled_decay, lr_in_momentum;
  std::optional<at::Tensor> lr_tensor, inv_scale, found_inf, noop_flag;

  bool centered(size_t lists) const { return lists > (momentum != 0 ? 4u : 3u); }

  int32_t launch(const TensorPlan::Launch& l) const {
    gpu::RmspropArguments a{};
    a.lr = lr;
    a.alpha = alpha;
    a.eps = eps;
    a.weight_decay = weight_decay;
    a.momentum = momentum;
    a.centered = centered(l.lists.lists);
    a.eps_inside = eps_inside;
    a.decoupled_decay = decoupled_decay;
    a.lr_in_momentum = lr_in_momentum;
    a.lr_on_device = scalar_pointer<const float>(lr_tensor, "lr_tensor", l.device);
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", l.device);
    a.noop_flag = scalar_pointer<const int32_t>(noop_flag, "noop_flag", l.device);
    return apex_multi_tensor_rmsprop(&l.place, &l.lists, &a);
  }
  void reference(const TensorPlan::Tensors& t) const {
    const std::vector<at::Tensor> none;
    call_reference<decltype(multi_tensor_rmsprop)>("multi_tensor_rmsprop", t[0], t[1], t[2],
                                                   centered(t.size()) ? t[3] : none, momentum != 0 ? t.back() : none,
                                                   lr, alpha, eps, weight_decay, momentum, eps_inside, decoupled_decay,
                                                   lr_in_momentum, lr_tensor, inv_scale, found_inf, noop_flag);
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_rmsprop", 0, [this](const TensorPlan::Launch& l) { return launch(l); },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch&) { reference(t); }};
  }
  void run_on(at::TensorList grads, at::TensorList params, at::TensorList square_avgs, at::TensorList grad_avgs,
              at::TensorList momentums) const {
    std::vector<std::string> names = {"grads", "params", "square_avgs"};
    std::vector<at::TensorList> lists = {grads, params, square_avgs};
    if (!grad_avgs.empty()) {
      names.push_back("grad_avgs");
      lists.push_back(grad_avgs);
    }
    if (momentum != 0) {  // else the buffers are neither read nor written
      TORCH_CHECK_VALUE(!momentums.empty() || grads.empty(),
                        "multi_tensor_rmsprop: momentum buffers are required, for momentum ", momentum);
      names.push_back("momentums");
      lists.push_back(momentums);
    }
    run_once(op(), names, 0b11110, lists);
  }
};

inline void multi_tensor_rmsprop(at::TensorList grads, at::TensorList params, at::TensorList square_avgs,
                                 at::TensorList grad_avgs, at::TensorList momentums, double lr, double alpha,
                                 double eps, double weight_decay, double momentum, bool eps_inside,
                                 bool decoupled_decay, bool lr_in_momentum, const std::optional<at::Tensor>& lr_tensor,
                                 const std::optional<at::Tensor>& inv_scale, const std::optional<at::Tensor>& found_inf,
                                 const std::optional<at::Tensor>& noop_flag) {
  const RmspropCall call{
      lr,        alpha,     eps,       weight_decay, momentum, eps_inside, decoupled_decay, lr_in_momentum,
      lr_tensor, inv_scale, found_inf, noop_flag};
  call.run_on(grads, params, square_avgs, grad_avgs, momentums);
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_rmsprop)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_rmsprop, m) {
  namespace py = pybind11;
  using Optional = std::optional<at::Tensor>;
  py::class_<apex::RmspropCall>(m, "multi_tensor_rmsprop_call")
      .def(py::init([](double lr, double alpha, double eps, double weight_decay, double momentum, bool eps_inside,
                       bool decoupled_decay, bool lr_in_momentum, Optional lr_tensor, Optional inv_scale,
                       Optional found_inf, Optional noop_flag) {
             return apex::RmspropCall{lr,
                                      alpha,
                                      eps,
                                      weight_decay,
                                      momentum,
                                      eps_inside,
                                      decoupled_decay,
                                      lr_in_momentum,
                                      std::move(lr_tensor),
                                      std::move(inv_scale),
                                      std::move(found_inf),
                                      std::move(noop_flag)};
           }),
           py::kw_only(), py::arg("lr"), py::arg("alpha"), py::arg("eps"), py::arg("weight_decay"), py::arg("momentum"),
           py::arg("eps_inside") = false, py::arg("decoupled_decay") = false, py::arg("lr_in_momentum") = false,
           py::arg("lr_tensor") = std::nullopt, py::arg("inv_scale") = std::nullopt,
           py::arg("found_inf") = std::nullopt, py::arg("noop_flag") = std::nullopt);
  m.def(
      "multi_tensor_rmsprop",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::RmspropCall& call) {
        apex::check_lists("multi_tensor_rmsprop", lists, 5);
        call.run_on(lists[0], lists[1], lists[2], lists[3], lists[4]);
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_rmsprop_step",
      [](apex::OptimizerPlan& plan, const apex::RmspropCall& call) { plan.run(call.op()); }, py::arg("plan"),
      py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
