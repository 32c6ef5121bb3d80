#pragma once
#include "generated/multi_tensor_novograd.h"
#include "per_tensor.h"

namespace apex {
inline void MultiTensorNovograd::check() const {
  check_betas(*this);
  TORCH_CHECK_VALUE(moment_mode == 0 || moment_mode == 1, name,
                    ": moment_mode is 0 (decay inside the average) or 1 (decoupled), not ", moment_mode);
  TORCH_CHECK_VALUE(norm_type == 0 || norm_type == 2, name, ": norm_type is 2 (L2) or 0 (largest magnitude), not ",
                    norm_type);
  check_step(*this);
  TORCH_CHECK_VALUE(update_norms || !advance_step, name, ": only a call that updates the norms advances the step");
}
inline int32_t MultiTensorNovograd::launch(const TensorPlan::Launch& l) const {
  PerTensor norms(grad_norms, l, "grad_norms");
  gpu::NovogradArguments a = arguments(l);
  a.one_minus_beta2 = 1.0 - beta2;
  a.grad_norms = norms.pointer_to_write();
  const int32_t status = apex_multi_tensor_novograd(&l.place, &l.lists, &a, norm_type == 0, update_norms);
  norms.write_back();
  return status;
}
inline void MultiTensorNovograd::reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
  PerTensor norms(grad_norms, l, "grad_norms");
  MultiTensorNovograd of_this = of_bucket(*this, l);
  of_this.grad_norms = norms.bucket();
  of_this.call_reference(t[0], t[1], t[2]);
  norms.write_back();
}
}  // namespace apex
