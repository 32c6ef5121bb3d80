// LAMB over lists of tensors (You et al. 2019, arXiv:1904.00962), in two launches after the global gradient norm:
// the first updates the moments, writes each element's update over its gradient and measures parameters and
// updates of every tensor; the second applies the updates, scaled by the ratio of those norms.
#pragma once
#include "multi_tensor_reduce.h"

namespace gpu {
enum LambMode : i32 { lamb_l2 = 0, lamb_decoupled = 1 };

struct LambArguments {
  double lr, beta1, beta2, eps, weight_decay;
  double max_grad_norm;   // gradients are divided by global_grad_norm / max_grad_norm where that exceeds 1; 0: never
  double max_param_norm;  // norms of parameters count as this where they exceed it; 0: never
  i32 step;               // 1 at the first step
  i32 mode;               // LambMode
  i32 bias_correction, grad_averaging;
  i32 use_nvlamb;    // scale by the ratio of norms also where weight_decay is 0
  i32 step_offset;   // added to step_on_device: 1 where that still holds the last step
  i32 advance_step;  // the second launch writes the step that was used back to step_on_device
  u32 tensors;       // second launch: of the table
  // All nullable; each replaces or joins a value above.
  const float* lr_on_device;
  i32* step_on_device;
  const float* global_grad_norm;
  const float* max_grad_norm_on_device;
  const float* inv_scale;  // gradients are multiplied by it; global_grad_norm is of gradients as they come
  const float* found_inf;
  const i32* noop_flag;
  // [tensors], of multi_tensor_lamb_stage1 alone: in place of weight_decay; and, all or none, of what these are named
  // after (the share of a gradient in its average is 1 - beta1, or 1 without grad_averaging).
  const float* per_tensor_decay;
  const float* per_tensor_beta1;
  const float* per_tensor_beta2;
  const float* per_tensor_gradient_share;
  const float* per_tensor_eps;
  const float* per_tensor_bias_correction;
  // [tensors], of multi_tensor_lamb_stage1 alone, both or none: receive the norms of parameters and of updates.
  float* parameter_norms;
  float* update_norms;
  const double* totals;  // second launch: sums of squares of the first, [parameters | updates][tensors]
};

GPU_FN i32 lamb_step(const LambArguments& a) { return a.step_on_device ? *a.step_on_device + a.step_offset : a.step; }
GPU_FN bool lamb_is_skipped(const LambArguments& a) {
  return (a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0);
}

template <class Math> struct LambScalars {
  Math beta1, gradient_share, beta2, one_minus_beta2, eps;
  Math gradient_scale;            // inv_scale, and the clip by the global norm
  Math l2, decay;                 // weight_decay as an L2 penalty, or decoupled; the other is 0
  Math correction1, correction2;  // 1 / (1 - beta1^step), 1 / sqrt(1 - beta2^step)

  GPU_FN void set_averages(double decay1, double share, double decay2, double added, bool correct, i32 step) {
    beta1 = (Math)decay1;
    gradient_share = (Math)share;
    beta2 = (Math)decay2;
    one_minus_beta2 = (Math)(1.0 - decay2);
    eps = (Math)added;
    correction1 = correct ? (Math)(1.0 / (1.0 - integer_power(decay1, (u32)step))) : Math(1);
    correction2 = correct ? (Math)(1.0 / sqrt(1.0 - integer_power(decay2, (u32)step))) : Math(1);
  }
  GPU_FN void set(const LambArguments& a, i32 step) {
    const double share = a.grad_averaging ? 1.0 - a.beta1 : 1.0;
    set_averages(a.beta1, share, a.beta2, a.eps, a.bias_correction != 0, step);
    l2 = a.mode == lamb_l2 ? (Math)a.weight_decay : Math(0);
    decay = a.mode == lamb_l2 ? Math(0) : (Math)a.weight_decay;
    gradient_scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    const float limit = a.max_grad_norm_on_device ? *a.max_grad_norm_on_device : (float)a.max_grad_norm;
    if (a.global_grad_norm && limit > 0.0f && *a.global_grad_norm > limit)
      gradient_scale *= (Math)limit / (Math)*a.global_grad_norm;
  }

  // Returns the update; the moments change.
  GPU_FN Math update(Math gradient, Math parameter, Math& exp_avg, Math& exp_avg_sq) const {
    const Math g = fma(l2, parameter, gradient * gradient_scale);
    exp_avg = fma(beta1, exp_avg, gradient_share * g);
    exp_avg_sq = fma(beta2, exp_avg_sq, one_minus_beta2 * g * g);
    const Math adam = (exp_avg * correction1) / fma(sqrt(exp_avg_sq), correction2, eps);
    return fma(decay, parameter, adam);
  }
};

// First launch. Lists: gradient (receives the update), parameter, exp_avg, exp_avg_sq.
template <class Math> struct LambMoments : ElementwiseOperation {
  using Arguments = LambArguments;
  using Reduction = Sum;
  static constexpr int lists = 4, unroll = 1, reductions = 2;
  static constexpr u32 read = 0b1111, written = 0b1101;
  LambScalars<Math> s;

  GPU_FN bool begin(const Arguments& a) {
    if (lamb_is_skipped(a)) return false;
#if defined(GPU_HOST)
    s.set(a, lamb_step(a));
#else
    GPU_SHARED(LambScalars<Math>, shared, 1);  // double arithmetic: one thread a block does it
    if (thread_x() == 0) shared[0].set(a, lamb_step(a));
    sync_threads();
    s = shared[0];
#endif
    return true;
  }
  GPU_FN void update(Math& gradient, const Math& parameter, Math& exp_avg, Math& exp_avg_sq, Math (&add)[2]) {
    gradient = s.update(gradient, parameter, exp_avg, exp_avg_sq);
    add[0] = parameter * parameter;
    add[1] = gradient * gradient;
  }
  GPU_FN void finish_tensor(const Arguments&, u32, const Math (&)[2]) {}  // the second launch reads the totals
  GPU_FN void finish(const Arguments&, const Math (&)[2]) {}
};
template <class Math> struct LambMomentsModel : LambMoments<Math> {
  static constexpr int lists = 5;
  GPU_FN void update(Math& gradient, const Math& parameter, Math& exp_avg, Math& exp_avg_sq, const Math&,
                     Math (&add)[2]) {
    LambMoments<Math>::update(gradient, parameter, exp_avg, exp_avg_sq, add);
  }
};

// lr, or lr scaled by the tensor's ratio of norms.
template <class Math>
GPU_FN Math lamb_step_size(Math lr, bool scaled, Math parameter_norm, Math update_norm) {
  return scaled && parameter_norm != Math(0) && update_norm != Math(0) ? lr * (parameter_norm / update_norm) : lr;
}

// Second launch. Lists as in the first: the update, the parameter, the moments (not touched).
template <class Math> struct LambApply : ElementwiseOperation {
  using Arguments = LambArguments;
  static constexpr int lists = 4, unroll = 2;
  static constexpr u32 read = 0b0011, written = 0b0010;
  Math lr, step_size;

#if defined(GPU_HOST)
  static void after_cpu(const Arguments& a) {
    if (a.step_on_device && a.advance_step && !lamb_is_skipped(a)) *a.step_on_device += a.step_offset;
  }
#endif
  GPU_FN bool begin(const Arguments& a) {
    if (lamb_is_skipped(a)) return false;
    lr = a.lr_on_device ? (Math)*a.lr_on_device : (Math)a.lr;
#if !defined(GPU_HOST)
    // No block of this launch reads the step.
    if (a.step_on_device && a.advance_step && block_x() == 0 && thread_x() == 0) *a.step_on_device += a.step_offset;
#endif
    return true;
  }
  GPU_FN void tensor(const Arguments& a, u32 t) {
    const Math* norms = reinterpret_cast<const Math*>(a.totals);
    const Math limit = (Math)a.max_param_norm;
    Math norm = sqrt(norms[t]);
    if (limit > Math(0) && norm > limit) norm = limit;
    step_size = lamb_step_size(lr, a.use_nvlamb || a.weight_decay != 0.0, norm, sqrt(norms[a.tensors + t]));
  }
  GPU_FN void update(const Math& update, Math& parameter, const Math&, const Math&) {
    parameter = fma(-step_size, update, parameter);
  }
};
template <class Math> struct LambApplyModel : LambApply<Math> {
  static constexpr int lists = 5;
  static constexpr u32 read = 0b00011, written = 0b10010;
  GPU_FN void update(const Math& update, Math& parameter, const Math&, const Math&, Math& model) {
    parameter = fma(-this->step_size, update, parameter);
    model = parameter;
  }
};
}  // namespace gpu

// V(name, arithmetic, gradient, parameter, exp_avg, exp_avg_sq); moments are float, or the parameter's type, as
// public apex keeps them.
#define MULTI_TENSOR_LAMB(V)                                                           \
  V(f32_f32_f32, float, float, float, float, float)                                    \
  V(f16_f32_f32, float, gpu::half, float, float, float)                                \
  V(bf16_f32_f32, float, gpu::bfloat16, float, float, float)                           \
  V(f16_f16_f32, float, gpu::half, gpu::half, float, float)                            \
  V(f16_f16_f16, float, gpu::half, gpu::half, gpu::half, gpu::half)                    \
  V(bf16_bf16_f32, float, gpu::bfloat16, gpu::bfloat16, float, float)                  \
  V(bf16_bf16_bf16, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16) \
  V(f32_f16_f32, float, float, gpu::half, float, float)                                \
  V(f32_bf16_f32, float, float, gpu::bfloat16, float, float)                           \
  V(f64_f64_f64, double, double, double, double, double)
// V(name, arithmetic, gradient, master parameter, exp_avg, exp_avg_sq, model copy)
#define MULTI_TENSOR_LAMB_MODEL(V)                                               \
  V(f16_f32_f32_f16, float, gpu::half, float, float, float, gpu::half)           \
  V(bf16_f32_f32_bf16, float, gpu::bfloat16, float, float, float, gpu::bfloat16) \
  V(f32_f32_f32_f16, float, float, float, float, float, gpu::half)               \
  V(f32_f32_f32_bf16, float, float, float, float, float, gpu::bfloat16)
