#pragma once
#include "generated/multi_tensor_amsgrad.h"
#include "multi_tensor_adam.h"

namespace apex {
inline void MultiTensorAmsgrad::check() const { check_adam(*this); }
inline int32_t MultiTensorAmsgrad::launch(const TensorPlan::Launch& l) const {
  return launch_adam(*this, l, &apex_multi_tensor_amsgrad);
}
}  // namespace apex
