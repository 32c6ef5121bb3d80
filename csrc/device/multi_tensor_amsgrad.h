// AMSGrad, the form of Adam and AdamW that divides by the largest second moment so far (Reddi, Kale & Kumar 2018,
// arXiv:1904.09237). Lists: gradient, parameter, exp_avg, exp_avg_sq, max_exp_avg_sq. Arguments and skipped steps are
// Adam's.
#pragma once
#include "multi_tensor_adam.h"

namespace gpu {
template <class Math> struct AmsgradUpdate : AdamUpdate<Math> {
  static constexpr int lists = 5;
  static constexpr u32 read = 0b11111, written = 0b11110;
  GPU_FN void update(const Math& gradient, Math& parameter, Math& exp_avg, Math& exp_avg_sq, Math& largest) {
    const auto& s = this->s;
    const Math g = fma(s.l2, parameter, gradient * s.inv_scale);
    exp_avg = fma(s.beta1, exp_avg, s.one_minus_beta1 * g);
    exp_avg_sq = fma(s.beta2, exp_avg_sq, s.one_minus_beta2 * g * g);
    // A nan on either side stays, as in torch.maximum.
    if (!(exp_avg_sq <= largest) && largest == largest) largest = exp_avg_sq;
    const Math divisor = fma(sqrt(largest), s.denominator, s.eps);
    parameter = fma(parameter, s.keep, -s.step_size * (exp_avg / divisor));
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, gradient, parameter, exp_avg, exp_avg_sq, max_exp_avg_sq)
#define MULTI_TENSOR_AMSGRAD(V)                                                   \
  V(f32_f32_f32_f32_f32, AmsgradUpdate, float, float, float, float, float, float) \
  V(f64_f64_f64_f64_f64, AmsgradUpdate, double, double, double, double, double, double)
