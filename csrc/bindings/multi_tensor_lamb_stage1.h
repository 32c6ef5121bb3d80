#pragma once
#include "generated/multi_tensor_lamb_stage1.h"
#include "per_tensor.h"

namespace apex {
inline void MultiTensorLambStage1::check() const {
  TORCH_CHECK_VALUE(step >= 1 && step <= INT32_MAX, name, ": step counts from 1, not ", step);
}
inline int32_t MultiTensorLambStage1::launch(const TensorPlan::Launch& l) const {
  const PerTensor decays(per_tensor_decay, l, "per_tensor_decay");
  gpu::LambArguments a = arguments(l);
  a.mode = gpu::lamb_decoupled;
  a.bias_correction = a.grad_averaging = 1;
  a.per_tensor_decay = decays.pointer();
  return apex_multi_tensor_lamb_stage1(&l.place, &l.lists, &a);
}
inline void MultiTensorLambStage1::reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
  MultiTensorLambStage1 of_this = *this;
  of_this.per_tensor_decay = PerTensor(per_tensor_decay, l, "per_tensor_decay").bucket();
  of_this.call_reference(t[0], t[1], t[2], t[3], t[4]);
}
}  // namespace apex
