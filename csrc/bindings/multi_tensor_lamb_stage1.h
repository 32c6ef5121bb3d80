#pragma once
#include "generated/multi_tensor_lamb_stage1.h"

inline void apex::MultiTensorLambStage1::check_more() const {
  const int given = bool(per_tensor_beta1) + bool(per_tensor_beta2) + bool(per_tensor_gradient_share) +
                    bool(per_tensor_eps) + bool(per_tensor_bias_correction);
  TORCH_CHECK_VALUE(given == 0 || given == 5,
                    "multi_tensor_lamb_stage1: per_tensor_beta1, _beta2, _gradient_share, _eps and _bias_correction go "
                    "together");
  TORCH_CHECK_VALUE(bool(per_tensor_param_norm) == bool(per_tensor_update_norm),
                    "multi_tensor_lamb_stage1: per_tensor_param_norm and per_tensor_update_norm go together");
}
