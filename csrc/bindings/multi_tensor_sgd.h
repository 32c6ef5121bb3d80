#pragma once
#include "host/multi_tensor_sgd.h"

#include "optimizer_plan.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
void multi_tensor_sgd(at::TensorList grads, at::TensorList params, at::TensorList momentums,
                      at::TensorList model_params, double weight_decay, double momentum, double dampening, double lr,
                      bool nesterov, bool first_run, bool wd_after_momentum, double scale,
                      const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& inv_scale,
                      const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& noop_flag,
                      bool marked_first_run, bool unscale_grads);

// Everything but the tensor lists.
struct SgdCall {
  double weight_decay, momentum, dampening, lr;
  bool nesterov, first_run, wd_after_momentum;
  double scale;
  std::optional<at::Tensor> lr_tensor, inv_scale, found_inf, noop_flag;
  bool marked_first_run, unscale_grads;

  bool unscales() const { return unscale_grads && inv_scale; }
  int32_t launch(const TensorPlan::Launch& l) const {
    gpu::SgdArguments a{};
    a.weight_decay = weight_decay;
    a.momentum = momentum;
    a.dampening = dampening;
    a.lr = lr;
    a.scale = scale;
    a.nesterov = nesterov;
    a.first_run = first_run;
    a.marked_first_run = marked_first_run;
    a.wd_after_momentum = wd_after_momentum;
    a.unscale_grads = unscales();
    a.lr_on_device = scalar_pointer<const float>(lr_tensor, "lr_tensor", l.device);
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.found_inf = scalar_pointer<const float>(found_inf, "found_inf", l.device);
    a.noop_flag = scalar_pointer<const int32_t>(noop_flag, "noop_flag", l.device);
    return apex_multi_tensor_sgd(&l.place, &l.lists, &a);
  }
  void reference(const TensorPlan::Tensors& t) const {
    const std::vector<at::Tensor> none;
    call_reference<decltype(multi_tensor_sgd)>("multi_tensor_sgd", t[0], t[1], t.size() > 2 ? t[2] : none,
                                               t.size() > 3 ? t[3] : none, weight_decay, momentum, dampening, lr,
                                               nesterov, first_run, wd_after_momentum, scale, lr_tensor, inv_scale,
                                               found_inf, noop_flag, marked_first_run, unscale_grads);
  }
  TensorPlan::Op op() const {
    return {"multi_tensor_sgd", 0, [this](const TensorPlan::Launch& l) { return launch(l); },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch&) { reference(t); }, unscales()};
  }
  void run_on(at::TensorList grads, at::TensorList params, at::TensorList momentums,
              at::TensorList model_params) const {
    std::vector<std::string> names = {"grads", "params"};
    std::vector<at::TensorList> lists = {grads, params};
    // Without momentum the buffers are neither read nor written.
    if (momentum != 0 || !model_params.empty()) {
      TORCH_CHECK_VALUE(!momentums.empty() || grads.empty(),
                        "multi_tensor_sgd: momentum buffers are required, for momentum ", momentum,
                        model_params.empty() ? "" : " and model parameters");
      names.push_back("momentums");
      lists.push_back(momentums);
    }
    if (!model_params.empty()) {
      names.push_back("model_params");
      lists.push_back(model_params);
    }
    run_once(op(), names, 0b1110, lists);
  }
};

inline void multi_tensor_sgd(at::TensorList grads, at::TensorList params, at::TensorList momentums,
                             at::TensorList model_params, double weight_decay, double momentum, double dampening,
                             double lr, bool nesterov, bool first_run, bool wd_after_momentum, double scale,
                             const std::optional<at::Tensor>& lr_tensor, const std::optional<at::Tensor>& inv_scale,
                             const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& noop_flag,
                             bool marked_first_run, bool unscale_grads) {
  const SgdCall call{weight_decay, momentum,  dampening, lr,        nesterov,  first_run,        wd_after_momentum,
                     scale,        lr_tensor, inv_scale, found_inf, noop_flag, marked_first_run, unscale_grads};
  call.run_on(grads, params, momentums, model_params);
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_sgd)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_sgd, m) {
  namespace py = pybind11;
  using Optional = std::optional<at::Tensor>;
  py::class_<apex::SgdCall>(m, "multi_tensor_sgd_call")
      .def(py::init([](double weight_decay, double momentum, double dampening, double lr, bool nesterov, bool first_run,
                       bool wd_after_momentum, double scale, Optional lr_tensor, Optional inv_scale, Optional found_inf,
                       Optional noop_flag, bool marked_first_run, bool unscale_grads) {
             return apex::SgdCall{weight_decay,
                                  momentum,
                                  dampening,
                                  lr,
                                  nesterov,
                                  first_run,
                                  wd_after_momentum,
                                  scale,
                                  std::move(lr_tensor),
                                  std::move(inv_scale),
                                  std::move(found_inf),
                                  std::move(noop_flag),
                                  marked_first_run,
                                  unscale_grads};
           }),
           py::kw_only(), py::arg("weight_decay"), py::arg("momentum"), py::arg("dampening"), py::arg("lr"),
           py::arg("nesterov"), py::arg("first_run"), py::arg("wd_after_momentum"), py::arg("scale"),
           py::arg("lr_tensor") = std::nullopt, py::arg("inv_scale") = std::nullopt,
           py::arg("found_inf") = std::nullopt, py::arg("noop_flag") = std::nullopt,
           py::arg("marked_first_run") = false, py::arg("unscale_grads") = false);
  m.def(
      "multi_tensor_sgd",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::SgdCall& call) {
        TORCH_CHECK_VALUE(lists.size() == 3 || lists.size() == 4,
                          "multi_tensor_sgd: 3 or 4 tensor lists (gradients, parameters, momentum buffers[, model "
                          "parameters]) are required, not ",
                          lists.size());
        const std::vector<at::Tensor> none;
        call.run_on(lists[0], lists[1], lists[2], lists.size() > 3 ? lists[3] : none);
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_sgd_step", [](apex::OptimizerPlan& plan, const apex::SgdCall& call) { plan.run(call.op()); },
      py::arg("plan"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
