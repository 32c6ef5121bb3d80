#pragma once
#include "generated/multi_tensor_novograd.h"

inline void apex::MultiTensorNovograd::check_more() const {
  TORCH_CHECK_VALUE(moment_mode == 0 || moment_mode == 1, name,
                    ": moment_mode is 0 (decay inside the average) or 1 (decoupled), not ", moment_mode);
  TORCH_CHECK_VALUE(norm_type == 0 || norm_type == 2, name, ": norm_type is 2 (L2) or 0 (largest magnitude), not ",
                    norm_type);
  TORCH_CHECK_VALUE(update_norms || !advance_step, name, ": only a call that updates the norms advances the step");
}
