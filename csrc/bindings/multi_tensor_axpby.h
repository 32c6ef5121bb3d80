#pragma once
#include "generated/multi_tensor_axpby.h"

inline void apex::MultiTensorAxpby::check() const {
  TORCH_CHECK_VALUE(arg_to_check >= -1 && arg_to_check <= 1,
                    "multi_tensor_axpby: arg_to_check is 0 (x), 1 (y) or -1 (both), not ", arg_to_check);
}
