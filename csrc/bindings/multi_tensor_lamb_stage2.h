#pragma once
#include "generated/multi_tensor_lamb_stage2.h"
#include "per_tensor.h"

namespace apex {
inline int32_t MultiTensorLambStage2::launch(const TensorPlan::Launch& l) const {
  const PerTensor param_norms(per_tensor_param_norm, l, "per_tensor_param_norm"),
      update_norms(per_tensor_update_norm, l, "per_tensor_update_norm");
  gpu::LambStage2Arguments a = arguments(l);
  a.scaled = use_nvlamb || weight_decay != 0;
  a.parameter_norms = param_norms.pointer();
  a.update_norms = update_norms.pointer();
  return apex_multi_tensor_lamb_stage2(&l.place, &l.lists, &a);
}
inline void MultiTensorLambStage2::reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
  MultiTensorLambStage2 of_this = *this;
  of_this.per_tensor_param_norm = PerTensor(per_tensor_param_norm, l, "per_tensor_param_norm").bucket();
  of_this.per_tensor_update_norm = PerTensor(per_tensor_update_norm, l, "per_tensor_update_norm").bucket();
  of_this.call_reference(t[0], t[1]);
}
}  // namespace apex
