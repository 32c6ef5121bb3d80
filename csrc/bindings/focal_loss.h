// Sigmoid focal loss: checks, outputs, launches.
#pragma once
#include "generated/focal_loss.h"
#include "checks.h"

#include <ATen/ops/empty.h>

namespace apex {
namespace focal {
template <class Call> void check(const Call& call) {
  const at::Tensor &logits = call.logits, &num_positives = call.num_positives;
  const double smoothing = call.smoothing;
  check_classes("focal_loss", logits, "targets", call.targets);
  TORCH_CHECK_VALUE(num_positives.sym_numel() == 1 && num_positives.is_floating_point(),
                    "focal_loss: num_positives_sum is a floating-point tensor of one element, not ",
                    num_positives.scalar_type(), " of shape ", num_positives.sym_sizes());
  TORCH_CHECK_VALUE(call.num_real_classes >= 0 && logits.sym_size(-1) >= call.num_real_classes,
                    "focal_loss: ", call.num_real_classes, " real classes do not fit logits of shape ",
                    logits.sym_sizes());
  TORCH_CHECK_VALUE(smoothing >= 0 && smoothing <= 1, "focal_loss: label_smoothing must be between 0 and 1, not ",
                    smoothing);
}

// Tensors as the kernels take them; they must live as long as the arguments.
struct Tensors {
  at::Tensor logits, targets, num_positives;
  gpu::FocalLoss a{};

  template <class Call> explicit Tensors(const Call& call)
      : logits(call.logits.contiguous()), targets(call.targets.contiguous()),
        num_positives(call.num_positives.to(math_type(call.logits))) {
    a.logits = bytes(logits), a.targets = bytes(targets), a.num_positives = bytes(num_positives);
    a.rows = targets.numel(), a.classes = logits.size(-1), a.real_classes = call.num_real_classes;
    a.alpha = call.alpha, a.gamma = call.gamma, a.smoothing = call.smoothing;
    a.type = element_type("focal_loss", logits.scalar_type());
    a.wide_targets = targets.scalar_type() == at::kLong;
    a.in_vectors = reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
  }
};
}  // namespace focal

inline void FocalLossForward::check() const { focal::check(*this); }
inline at::Tensor FocalLossForward::outputs() const { return at::empty({}, logits.options().dtype(math_type(logits))); }
inline bool FocalLossForward::launch(const apex_place& place, Result& made) const {
  focal::Tensors call(*this);
  made = outputs();
  call.a.result = mutable_bytes(made);
  return run_with_workspace(&apex_focal_loss_forward, place, call.a, unit, logits.device());
}

inline void FocalLossBackward::check() const {
  focal::check(*this);
  TORCH_CHECK_VALUE(grad_loss.sym_numel() == 1,
                    "focal_loss: the gradient of the loss is one element, not a tensor of shape ",
                    grad_loss.sym_sizes());
}
inline at::Tensor FocalLossBackward::outputs() const { return at::empty_symint(logits.sym_sizes(), logits.options()); }
inline bool FocalLossBackward::launch(const apex_place& place, Result& made) const {
  focal::Tensors call(*this);
  const at::Tensor grad = grad_loss.to(math_type(logits));
  made = outputs();
  call.a.grad_loss = bytes(grad), call.a.result = mutable_bytes(made);
  call.a.in_vectors = call.a.in_vectors && reinterpret_cast<uintptr_t>(call.a.result) % 16 == 0;
  return !use_reference(apex_focal_loss_backward(&place, &call.a), unit);
}
}  // namespace apex
