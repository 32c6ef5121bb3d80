#pragma once
#include "generated/multi_tensor_lars.h"

inline void apex::MultiTensorLars::check() const {
  TORCH_CHECK_VALUE(bool(grad_norms) == bool(param_norms),
                    "multi_tensor_lars: norms of gradients and parameters go together");
}
