#pragma once
#include "generated/multi_tensor_l2norm.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace apex {
inline void MultiTensorL2norm::reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const {
  PerTensor results(per_tensor, l, "per_tensor");
  MultiTensorL2norm of_this = *this;
  // A raised flag leaves its outputs as they are: the first bucket's is `total` itself, a later one's adds nothing.
  of_this.total = l.first ? total : at::zeros_like(total);
  of_this.per_tensor = results.bucket_if_any();
  if (!l.first || !l.last) of_this.clip_coefficient = std::nullopt;
  const bool watch = l.last && !l.first && clip_coefficient;
  const at::Tensor skipped = watch && check_noop && noop_flag ? noop_flag->ne(0) : at::Tensor();
  of_this.call_reference(t[0]);
  results.write_back();
  if (!l.first) total.copy_(maximum ? total.maximum(of_this.total) : total.hypot(of_this.total));
  if (!watch) return;
  const at::Tensor factor = total.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0).view_as(*clip_coefficient);
  clip_coefficient->copy_(skipped.defined() ? factor.where(skipped.logical_not().view_as(factor), *clip_coefficient)
                                            : factor);
}

// Of no tensors at all.
inline void set_to_nothing(const MultiTensorL2norm& call) {
  call.total.zero_();
  if (call.clip_coefficient) call.clip_coefficient->fill_(1.0);
}
inline void MultiTensorL2norm::run(at::TensorList tensors) const {
  if (tensors.empty()) return set_to_nothing(*this);
  run_once(op(), {"tensors"}, 0b0, {tensors});
}
inline void MultiTensorL2norm::run(OptimizerPlan& plan) const {
  plan.run(op());
  if (plan.launches() == 0) set_to_nothing(*this);
}
}  // namespace apex
