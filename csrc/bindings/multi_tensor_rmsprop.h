#pragma once
#include "generated/multi_tensor_rmsprop.h"

namespace apex {
// Momentum buffers are there where momentum is not 0, so that the number of lists tells whether averages of gradients
// are.
inline bool is_centered(const MultiTensorRmsprop& call, size_t lists) { return lists > (call.momentum != 0 ? 4u : 3u); }

inline void MultiTensorRmsprop::check_lists(at::TensorList grads, at::TensorList, at::TensorList, at::TensorList,
                                            at::TensorList momentums) const {
  TORCH_CHECK_VALUE(momentum == 0 || !momentums.empty() || grads.empty(),
                    "multi_tensor_rmsprop: momentum buffers are required, for momentum ", momentum);
}
inline int32_t MultiTensorRmsprop::launch(const TensorPlan::Launch& l) const {
  gpu::RmspropArguments a = arguments(l);
  a.centered = is_centered(*this, l.lists.lists);
  return apex_multi_tensor_rmsprop(&l.place, &l.lists, &a);
}
inline void MultiTensorRmsprop::reference(const TensorPlan::Tensors& t, const TensorPlan::Launch&) const {
  const std::vector<at::Tensor> none;
  call_reference(t[0], t[1], t[2], is_centered(*this, t.size()) ? t[3] : none, momentum != 0 ? t.back() : none);
}
}  // namespace apex
