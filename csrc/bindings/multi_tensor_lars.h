#pragma once
#include "generated/multi_tensor_lars.h"
#include "per_tensor.h"

namespace apex {
inline void MultiTensorLars::check() const {
  TORCH_CHECK_VALUE(bool(grad_norms) == bool(param_norms),
                    "multi_tensor_lars: norms of gradients and parameters go together");
}
inline int32_t MultiTensorLars::launch(const TensorPlan::Launch& l) const {
  const PerTensor of_gradients(grad_norms, l, "grad_norms"), of_parameters(param_norms, l, "param_norms");
  gpu::LarsArguments a = arguments(l);
  a.grad_norms = of_gradients.pointer();
  a.param_norms = of_parameters.pointer();
  return apex_multi_tensor_lars(&l.place, &l.lists, &a);
}
inline void MultiTensorLars::reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
  MultiTensorLars of_this = *this;
  of_this.grad_norms = PerTensor(grad_norms, l, "grad_norms").bucket_if_any();
  of_this.param_norms = PerTensor(param_norms, l, "param_norms").bucket_if_any();
  of_this.call_reference(t[0], t[1], t[2], list_of(t, 3));
}
}  // namespace apex
