#pragma once
#include "generated/multi_tensor_lamb.h"

namespace apex {
// The norm of all gradients was measured on one device; a group may have parameters on others.
inline std::optional<at::Tensor> norm_on(const std::optional<at::Tensor>& norm, c10::Device device) {
  const bool elsewhere = norm && norm->defined() && norm->device() != device;
  return elsewhere ? norm->to(device, /*non_blocking=*/true) : norm;
}
inline int32_t MultiTensorLamb::launch(const TensorPlan::Launch& l) const {
  const std::optional<at::Tensor> norm = norm_on(global_grad_norm, l.device);
  gpu::LambArguments a = arguments(l);
  set(a.global_grad_norm, norm, "global_grad_norm", l.device);
  return apex_multi_tensor_lamb(&l.place, &l.lists, &a);
}
inline void MultiTensorLamb::reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
  MultiTensorLamb of_this = of_bucket(*this, l);
  of_this.global_grad_norm = norm_on(global_grad_norm, l.device);
  of_this.call_reference(t[0], t[1], t[2], t[3], list_of(t, 4));
}
}  // namespace apex
