#pragma once
#include "host/multi_tensor_l2norm.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "optimizer_plan.h"
#include "per_tensor.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "tensor_plan.h"

namespace apex {
void multi_tensor_l2norm(at::TensorList tensors, const at::Tensor& total, const std::optional<at::Tensor>& per_tensor,
                         const std::optional<at::Tensor>& noop_flag, double scale,
                         const std::optional<at::Tensor>& inv_scale, bool check_noop, bool maximum, double blend_new,
                         double blend_old, double max_norm, const std::optional<at::Tensor>& clip_coefficient);

// Everything but the measured tensors.
struct NormCall {
  at::Tensor total;
  std::optional<at::Tensor> per_tensor, noop_flag;
  double scale;
  std::optional<at::Tensor> inv_scale;
  bool check_noop, maximum;
  double blend_new, blend_old, max_norm;
  std::optional<at::Tensor> clip_coefficient;

  int32_t launch(const TensorPlan::Launch& l) const {
    gpu::NormArguments a{};
    a.scale = scale;
    a.inv_scale = scalar_pointer<const float>(inv_scale, "inv_scale", l.device);
    a.noop_flag = scalar_pointer<int32_t>(noop_flag, "noop_flag", l.device);
    a.check_noop = check_noop;
    a.first = l.first;
    a.last = l.last;
    a.total = scalar_pointer<float>(total, "total", l.device);
    a.blend_new = blend_new;
    a.blend_old = blend_old;
    a.max_norm = max_norm;
    a.clip_coefficient = scalar_pointer<float>(clip_coefficient, "clip_coefficient", l.device);
    PerTensor results(per_tensor, l, "per_tensor");
    a.per_tensor = results.pointer_to_write();
    const int32_t status = apex_multi_tensor_l2norm(&l.place, &l.lists, &a, maximum);
    results.write_back();
    return status;
  }

  void reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
    PerTensor results(per_tensor, l, "per_tensor");
    // A raised flag leaves its outputs as they are: the first bucket's is `total` itself, a later one's adds nothing.
    const at::Tensor of_bucket = l.first ? total : at::zeros_like(total);
    const bool watch = l.last && !l.first && clip_coefficient;
    const at::Tensor skipped = watch && check_noop && noop_flag ? noop_flag->ne(0) : at::Tensor();
    call_reference<decltype(multi_tensor_l2norm)>(
        "multi_tensor_l2norm", t[0], of_bucket, results.bucket_if_any(), noop_flag, scale, inv_scale, check_noop,
        maximum, blend_new, blend_old, max_norm, l.first && l.last ? clip_coefficient : std::nullopt);
    results.write_back();
    if (!l.first) total.copy_(maximum ? total.maximum(of_bucket) : total.hypot(of_bucket));
    if (!watch) return;
    const at::Tensor factor = total.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0).view_as(*clip_coefficient);
    clip_coefficient->copy_(skipped.defined() ? factor.where(skipped.logical_not().view_as(factor), *clip_coefficient)
                                              : factor);
  }

  TensorPlan::Op op() const {
    return {"multi_tensor_l2norm", 1, [this](const TensorPlan::Launch& l) { return launch(l); },
            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) { reference(t, l); }};
  }
  // The norm of no tensors at all.
  void of_nothing() const {
    total.zero_();
    if (clip_coefficient) clip_coefficient->fill_(1.0);
  }
};

inline void multi_tensor_l2norm(at::TensorList tensors, const at::Tensor& total,
                                const std::optional<at::Tensor>& per_tensor, const std::optional<at::Tensor>& noop_flag,
                                double scale, const std::optional<at::Tensor>& inv_scale, bool check_noop, bool maximum,
                                double blend_new, double blend_old, double max_norm,
                                const std::optional<at::Tensor>& clip_coefficient) {
  const NormCall call{total,   per_tensor, noop_flag, scale,    inv_scale,       check_noop,
                      maximum, blend_new,  blend_old, max_norm, clip_coefficient};
  if (tensors.empty()) return call.of_nothing();
  run_once(call.op(), {"tensors"}, 0b0, {tensors});
}
}  // namespace apex

APEX_IN_PLACE_OP(multi_tensor_l2norm)

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(multi_tensor_l2norm, m) {
  namespace py = pybind11;
  py::class_<apex::NormCall>(m, "multi_tensor_l2norm_call")
      .def(
          py::init([](at::Tensor total, std::optional<at::Tensor> per_tensor, std::optional<at::Tensor> noop_flag,
                      double scale, std::optional<at::Tensor> inv_scale, bool check_noop, bool maximum,
                      double blend_new, double blend_old, double max_norm, std::optional<at::Tensor> clip_coefficient) {
            return apex::NormCall{std::move(total),
                                  std::move(per_tensor),
                                  std::move(noop_flag),
                                  scale,
                                  std::move(inv_scale),
                                  check_noop,
                                  maximum,
                                  blend_new,
                                  blend_old,
                                  max_norm,
                                  std::move(clip_coefficient)};
          }),
          py::kw_only(), py::arg("total"), py::arg("per_tensor") = std::nullopt, py::arg("noop_flag") = std::nullopt,
          py::arg("scale") = 1.0, py::arg("inv_scale") = std::nullopt, py::arg("check_noop") = false,
          py::arg("maximum") = false, py::arg("blend_new") = 1.0, py::arg("blend_old") = 0.0, py::arg("max_norm") = 0.0,
          py::arg("clip_coefficient") = std::nullopt);
  m.def(
      "multi_tensor_l2norm",
      [](const std::vector<std::vector<at::Tensor>>& lists, const apex::NormCall& call) {
        apex::check_lists("multi_tensor_l2norm", lists, 1);
        if (lists[0].empty()) return call.of_nothing();
        apex::run_once(call.op(), {"tensors"}, 0b0, {lists[0]});
      },
      py::arg("tensor_lists"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "multi_tensor_l2norm_step",
      [](apex::OptimizerPlan& plan, const apex::NormCall& call) {
        plan.run(call.op());
        if (plan.launches() == 0) call.of_nothing();
      },
      py::arg("plan"), py::arg("call"), py::call_guard<py::gil_scoped_release>());
}
#endif
