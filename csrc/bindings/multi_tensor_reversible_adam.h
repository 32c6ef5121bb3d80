#pragma once
#include "generated/multi_tensor_reversible_adam.h"

inline void apex::MultiTensorReversibleAdam::check_more() const {
  TORCH_CHECK_VALUE(scale != 0, "multi_tensor_reversible_adam: gradients are divided by scale, which is 0");
  TORCH_CHECK_VALUE(
      !undo || (beta1 > 0 && beta2 > 0 && step_size * weight_decay != 1),
      "multi_tensor_reversible_adam: nothing is left to undo a step from where a beta is 0, or step_size * "
      "weight_decay is 1");
}
