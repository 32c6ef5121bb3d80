#pragma once
#include "generated/multi_tensor_sgd.h"

// Without momentum the buffers are neither read nor written.
inline void apex::MultiTensorSgd::check_lists(at::TensorList grads, at::TensorList, at::TensorList momentums,
                                              at::TensorList model_params) const {
  TORCH_CHECK_VALUE((momentum == 0 && model_params.empty()) || !momentums.empty() || grads.empty(),
                    "multi_tensor_sgd: momentum buffers are required, for momentum ", momentum,
                    model_params.empty() ? "" : " and model parameters");
}
