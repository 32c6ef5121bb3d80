// Sigmoid focal loss: checks, launches, autograd.
#pragma once
#include "functional.h"
#include "host/focal_loss.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/empty.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
namespace focal {
using Forward = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double, double, double);
using Backward = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double,
                            double, double);

inline at::ScalarType math_type(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Works with symbolic sizes, but for the number of classes.
inline void check(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& num_positives,
                  int64_t num_real_classes, double smoothing) {
  element_type("focal_loss", logits.scalar_type());
  TORCH_CHECK_VALUE(logits.dim() >= 1 && targets.sym_sizes() == logits.sym_sizes().slice(0, logits.dim() - 1),
                    "focal_loss: logits of shape ", logits.sym_sizes(),
                    " need targets of the same shape without the last dimension, not ", targets.sym_sizes());
  TORCH_CHECK_TYPE(targets.scalar_type() == at::kLong || targets.scalar_type() == at::kInt,
                   "focal_loss: targets are int64 or int32, not ", targets.scalar_type());
  TORCH_CHECK_VALUE(num_positives.sym_numel() == 1 && num_positives.is_floating_point(),
                    "focal_loss: num_positives_sum is a floating-point tensor of one element, not ",
                    num_positives.scalar_type(), " of shape ", num_positives.sym_sizes());
  TORCH_CHECK_VALUE(targets.device() == logits.device() && num_positives.device() == logits.device(),
                    "focal_loss: logits are on ", logits.device(), ", targets on ", targets.device(),
                    " and num_positives_sum on ", num_positives.device());
  TORCH_CHECK_VALUE(num_real_classes >= 0 && logits.sym_size(-1) >= num_real_classes, "focal_loss: ", num_real_classes,
                    " real classes do not fit logits of shape ", logits.sym_sizes());
  TORCH_CHECK_VALUE(smoothing >= 0 && smoothing <= 1, "focal_loss: label_smoothing must be between 0 and 1, not ",
                    smoothing);
}

// Tensors as the kernels take them; they must live as long as the arguments.
struct Call {
  at::Tensor logits, targets, num_positives;
  gpu::FocalLoss a{};

  Call(const at::Tensor& logits_, const at::Tensor& targets_, const at::Tensor& num_positives_,
       int64_t num_real_classes, double alpha, double gamma, double smoothing)
      : logits(logits_.contiguous()), targets(targets_.contiguous()),
        num_positives(num_positives_.to(math_type(logits_))) {
    a.logits = static_cast<const gpu::u8*>(logits.const_data_ptr());
    a.targets = static_cast<const gpu::u8*>(targets.const_data_ptr());
    a.num_positives = static_cast<const gpu::u8*>(num_positives.const_data_ptr());
    a.rows = targets.numel();
    a.classes = logits.size(-1);
    a.real_classes = num_real_classes;
    a.alpha = alpha;
    a.gamma = gamma;
    a.smoothing = smoothing;
    a.type = element_type("focal_loss", logits.scalar_type());
    a.wide_targets = targets.scalar_type() == at::kLong;
    a.in_vectors = reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
  }
};
}  // namespace focal

inline at::Tensor focal_loss_forward(const at::Tensor& logits, const at::Tensor& targets,
                                     const at::Tensor& num_positives, int64_t num_real_classes, double alpha,
                                     double gamma, double smoothing) {
  focal::check(logits, targets, num_positives, num_real_classes, smoothing);
  const apex_place place = place_of(logits.device());
  if (place.platform >= 0) {
    focal::Call call(logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing);
    if (!use_reference(apex_focal_loss_prepare(&place, &call.a), "focal_loss")) {
      const auto options = logits.options().dtype(focal::math_type(logits));
      const at::Tensor loss = at::empty({}, options), partials = at::empty({call.a.blocks}, options);
      call.a.result = static_cast<gpu::u8*>(loss.mutable_data_ptr());
      call.a.partials = static_cast<gpu::u8*>(partials.mutable_data_ptr());
      if (!use_reference(apex_focal_loss_forward(&place, &call.a), "focal_loss")) return loss;
    }
  }
  return call_reference<focal::Forward>("focal_loss_forward", logits, targets, num_positives, num_real_classes, alpha,
                                        gamma, smoothing);
}
inline at::Tensor focal_loss_backward(const at::Tensor& grad_loss, const at::Tensor& logits, const at::Tensor& targets,
                                      const at::Tensor& num_positives, int64_t num_real_classes, double alpha,
                                      double gamma, double smoothing) {
  focal::check(logits, targets, num_positives, num_real_classes, smoothing);
  TORCH_CHECK_VALUE(grad_loss.numel() == 1 && grad_loss.device() == logits.device(),
                    "focal_loss: the gradient of the loss is one element on ", logits.device(),
                    ", not a tensor of shape ", grad_loss.sizes(), " on ", grad_loss.device());
  const apex_place place = place_of(logits.device());
  if (place.platform >= 0) {
    focal::Call call(logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing);
    const at::Tensor grad = grad_loss.to(focal::math_type(logits)),
                     gradient = at::empty(logits.sizes(), logits.options());
    call.a.grad_loss = static_cast<const gpu::u8*>(grad.const_data_ptr());
    call.a.result = static_cast<gpu::u8*>(gradient.mutable_data_ptr());
    call.a.in_vectors = call.a.in_vectors && reinterpret_cast<uintptr_t>(call.a.result) % 16 == 0;
    if (!use_reference(apex_focal_loss_backward(&place, &call.a), "focal_loss")) return gradient;
  }
  return call_reference<focal::Backward>("focal_loss_backward", grad_loss, logits, targets, num_positives,
                                         num_real_classes, alpha, gamma, smoothing);
}
inline at::Tensor focal_loss_forward_meta(const at::Tensor& logits, const at::Tensor& targets,
                                          const at::Tensor& num_positives, int64_t num_real_classes, double, double,
                                          double smoothing) {
  focal::check(logits, targets, num_positives, num_real_classes, smoothing);
  return at::empty({}, logits.options().dtype(focal::math_type(logits)));
}
inline at::Tensor focal_loss_backward_meta(const at::Tensor&, const at::Tensor& logits, const at::Tensor& targets,
                                           const at::Tensor& num_positives, int64_t num_real_classes, double, double,
                                           double smoothing) {
  focal::check(logits, targets, num_positives, num_real_classes, smoothing);
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

struct FocalLossNode : Node {
  SavedVariable logits, targets, num_positives;
  int64_t num_real_classes = 0;
  double alpha = 0, gamma = 0, smoothing = 0;

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);
    static const auto backward = dispatcher_op<focal::Backward>("apex::focal_loss_backward");
    variable_list found(1);
    if (gradients[0].defined() && task_should_compute_output(0))
      found[0] = backward.call(gradients[0], logits.unpack(), targets.unpack(), num_positives.unpack(),
                               num_real_classes, alpha, gamma, smoothing);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&logits, &targets, &num_positives}) s->reset_data();
  }
  std::string name() const override { return "ApexFocalLossBackward"; }
};

// num_positives gets no gradient, as in public apex.
inline at::Tensor focal_loss_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& logits,
                                              const at::Tensor& targets, const at::Tensor& num_positives,
                                              int64_t num_real_classes, double alpha, double gamma, double smoothing) {
  static const auto forward = dispatcher_op<focal::Forward>("apex::focal_loss_forward");
  refuse_forward_mode_of("focal_loss", logits, num_positives);
  NodePointer<FocalLossNode> node;
  if (records(logits)) {
    node = make_node<FocalLossNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(logits));
    node->num_real_classes = num_real_classes;
    node->alpha = alpha;
    node->gamma = gamma;
    node->smoothing = smoothing;
    node->logits = SavedVariable(logits, false);
    node->targets = SavedVariable(targets, false);
    node->num_positives = SavedVariable(num_positives, false);
  }
  at::Tensor loss = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward.redispatch(keys & c10::after_autograd_keyset, logits, targets, num_positives, num_real_classes,
                              alpha, gamma, smoothing);
  }();
  if (node) torch::autograd::set_history(loss, node);
  return loss;
}
inline at::Tensor focal_loss_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_loss,
                                               const at::Tensor& logits, const at::Tensor& targets,
                                               const at::Tensor& num_positives, int64_t num_real_classes, double alpha,
                                               double gamma, double smoothing) {
  static const auto backward = dispatcher_op<focal::Backward>("apex::focal_loss_backward");
  refuse_forward_mode_of("focal_loss", grad_loss, logits, num_positives);
  at::Tensor gradient = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return backward.redispatch(keys & c10::after_autograd_keyset, grad_loss, logits, targets, num_positives,
                               num_real_classes, alpha, gamma, smoothing);
  }();
  if (records(grad_loss, logits))
    torch::autograd::set_history(gradient, no_double_backward("focal_loss", "is not implemented", grad_loss, logits));
  return gradient;
}
}  // namespace apex

// No autocast rule: arithmetic and loss are float32 whatever the logits are.
APEX_FUNCTIONAL_OP(focal_loss_forward)
APEX_FUNCTIONAL_OP(focal_loss_backward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(focal_loss, m) {
  m.def(
      "focal_loss",
      [](const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& num_positives, int64_t num_real_classes,
         double alpha, double gamma, double smoothing) {
        static const auto forward =
            apex::dispatcher_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double,
                                           double, double)>("apex::focal_loss_forward");
        return forward.call(logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
