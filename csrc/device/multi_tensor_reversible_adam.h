// Adam as public apex's first FusedAdam has it, over lists of tensors: eps beside the square root or inside, no
// correction of the averages but in the step's size, in which weight decay shares. Such a step can be undone: what is
// left of it are its results, from which the values before follow but for rounding.
// Lists: gradient, parameter, exp_avg, exp_avg_sq and, optionally, a lower-precision copy of the parameter.
#pragma once
#include "multi_tensor.h"

namespace gpu {
struct ReversibleAdamArguments {
  double step_size;  // lr, times sqrt(1 - beta2^step) / (1 - beta1^step) where averages are corrected
  double beta1, beta2, eps, weight_decay;
  double scale;  // gradients are divided by it
  i32 eps_inside_sqrt;
  i32 skip_non_finite;  // elements whose gradient is inf or nan stay as they are, and raise overflow_flag
  i32 undo;
  i32 reserved;
  i32* overflow_flag;  // nullable. Undoing: where it is 0 nothing is undone
};

template <class Math> struct ReversibleAdamScalars {
  Math step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, eps_inside, eps_beside, decay, scale;

  GPU_FN void set(const ReversibleAdamArguments& a) {
    step_size = (Math)a.step_size;
    beta1 = (Math)a.beta1;
    one_minus_beta1 = (Math)(1.0 - a.beta1);
    beta2 = (Math)a.beta2;
    one_minus_beta2 = (Math)(1.0 - a.beta2);
    eps_inside = a.eps_inside_sqrt ? (Math)a.eps : Math(0);
    eps_beside = a.eps_inside_sqrt ? Math(0) : (Math)a.eps;
    decay = (Math)a.weight_decay;
    scale = (Math)a.scale;
  }
  GPU_FN Math adam(Math exp_avg, Math exp_avg_sq) const {
    return exp_avg / (sqrt(exp_avg_sq + eps_inside) + eps_beside);
  }
};

template <class Math> struct ReversibleAdamStep : ElementwiseOperation {
  using Arguments = ReversibleAdamArguments;
  static constexpr int lists = 4, unroll = 1;
  static constexpr u32 read = 0b1111, written = 0b1110;
  ReversibleAdamScalars<Math> s;
  bool skips;
  u32 not_finite;

  GPU_FN bool begin(const Arguments& a) {
    s.set(a);
    skips = a.skip_non_finite != 0;
    not_finite = 0;
    return true;
  }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& exp_avg, Math& exp_avg_sq) {
    const Math g = gradient / s.scale;
    const bool left_out = skips & !is_finite(g);
    not_finite |= left_out;
    const Math average = fma(s.beta1, exp_avg, s.one_minus_beta1 * g);
    const Math square = fma(s.beta2, exp_avg_sq, s.one_minus_beta2 * g * g);
    const Math stepped = fma(-s.step_size, fma(s.decay, parameter, s.adam(average, square)), parameter);
    exp_avg = left_out ? exp_avg : average;
    exp_avg_sq = left_out ? exp_avg_sq : square;
    parameter = left_out ? parameter : stepped;
  }
  GPU_FN void end(const Arguments& a) {
    if (not_finite && a.overflow_flag) raise_flag(a.overflow_flag);
  }
};

template <class Math> struct ReversibleAdamCopyStep : ReversibleAdamStep<Math> {
  static constexpr int lists = 5;
  static constexpr u32 read = 0b01111, written = 0b11110;
  GPU_FN void update(const Math& gradient, Math& parameter, Math& exp_avg, Math& exp_avg_sq, Math& copy) {
    ReversibleAdamStep<Math>::update(gradient, parameter, exp_avg, exp_avg_sq);
    copy = parameter;
  }
};

template <class Math> struct ReversibleAdamUndo : ElementwiseOperation {
  using Arguments = ReversibleAdamArguments;
  static constexpr int lists = 4, unroll = 1;
  static constexpr u32 read = 0b1111, written = 0b1110;
  ReversibleAdamScalars<Math> s;
  Math kept;  // what decay left of a parameter

  GPU_FN bool begin(const Arguments& a) {
    if (a.overflow_flag && *a.overflow_flag == 0) return false;
    s.set(a);
    kept = (Math)(1.0 - a.step_size * a.weight_decay);
    return true;
  }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& exp_avg, Math& exp_avg_sq) {
    const Math g = gradient / s.scale;
    const bool stepped = is_finite(g);
    const Math before = fma(s.step_size, s.adam(exp_avg, exp_avg_sq), parameter) / kept;
    const Math average = fma(-s.one_minus_beta1, g, exp_avg) / s.beta1;
    const Math square = fma(-s.one_minus_beta2 * g, g, exp_avg_sq) / s.beta2;
    parameter = stepped ? before : parameter;
    exp_avg = stepped ? average : exp_avg;
    exp_avg_sq = stepped ? (square >= Math(0) ? square : Math(0)) : exp_avg_sq;  // rounding may leave less than 0
  }
};
}  // namespace gpu

// V(name, arithmetic, gradient, parameter, exp_avg, exp_avg_sq)
#define MULTI_TENSOR_REVERSIBLE_ADAM(V)              \
  V(f32, float, float, float, float, float)          \
  V(f16, float, gpu::half, float, float, float)      \
  V(bf16, float, gpu::bfloat16, float, float, float) \
  V(f64, double, double, double, double, double)
// V(name, arithmetic, gradient, parameter, exp_avg, exp_avg_sq, copy)
#define MULTI_TENSOR_REVERSIBLE_ADAM_COPY(V)                   \
  V(f32_f32, float, float, float, float, float, float)         \
  V(f16_f16, float, gpu::half, float, float, float, gpu::half) \
  V(bf16_bf16, float, gpu::bfloat16, float, float, float, gpu::bfloat16)
