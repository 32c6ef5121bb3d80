// NovoGrad over lists of tensors (Ginsburg et al. 2019, arXiv:1905.11286), in two launches: the first measures every
// gradient and averages its norm with those of the steps before; the second updates. Lists: gradient, parameter,
// exp_avg.
#pragma once
#include "multi_tensor_reduce.h"
#include "multi_tensor_unscale.h"

namespace gpu {
enum NovogradMode : i32 { novograd_inside = 0, novograd_decoupled = 1 };

struct NovogradArguments {
  double lr, beta1, beta2, one_minus_beta2, eps, weight_decay;
  i32 step;         // 1 at the first step
  i32 moment_mode;  // NovogradMode: weight decay is averaged with the gradient, or joins the update
  i32 bias_correction, grad_averaging;
  i32 step_offset;       // added to step_on_device: 1 where that still holds the last step
  i32 advance_step;      // the first launch, which does not read it, writes the step back to step_on_device
  const u64* gradients;  // [tensors]: the first list of the table; 0 where a tensor is left out
  float* grad_norms;     // [tensors]: averaged norms; below 0: none yet, so that the first stands alone
  // All nullable; each replaces or joins a value above.
  const float* lr_on_device;
  i32* step_on_device;
  const float* inv_scale;  // gradients are multiplied by it first
  const float* found_inf;  // not zero: the launches leave everything as it is
  const i32* noop_flag;    // likewise
  i32 unscale_grads;       // a third launch leaves gradients multiplied by inv_scale
  i32 reserved;
};

GPU_FN bool novograd_is_skipped(const NovogradArguments& a) {
  return (a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0);
}

// First launch, which sees the gradients alone.
template <class Math> struct NovogradNormBase : ElementwiseOperation {
  using Arguments = NovogradArguments;
  static constexpr int lists = 1, unroll = 16 / sizeof(Math), reductions = 1;
  static constexpr u32 read = 0b1, written = 0b0;
  Math scale;

  GPU_FN bool begin(const Arguments& a) {
    if (novograd_is_skipped(a)) return false;
    scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    return true;
  }
  GPU_FN void finish(const Arguments& a, const Math (&)[1]) {
    if (a.step_on_device && a.advance_step) *a.step_on_device += a.step_offset;
  }
};

template <class Math> struct NovogradNorm : NovogradNormBase<Math> {
  using typename NovogradNormBase<Math>::Arguments;
  using Reduction = Sum;

  GPU_FN void update(const Math& gradient, Math (&add)[1]) {
    const Math g = gradient * this->scale;
    add[0] = g * g;
  }
  GPU_FN void finish_tensor(const Arguments& a, u32 t, const Math (&totals)[1]) {
    if (!a.gradients[t]) return;
    const Math old = (Math)a.grad_norms[t];
    const Math square = old < Math(0) ? totals[0] : (Math)a.beta2 * old * old + (Math)a.one_minus_beta2 * totals[0];
    a.grad_norms[t] = (float)sqrt(square);
  }
};

template <class Math> struct NovogradMaximum : NovogradNormBase<Math> {
  using typename NovogradNormBase<Math>::Arguments;
  using Reduction = Maximum;

  GPU_FN void update(const Math& gradient, Math (&add)[1]) {
    const Math g = gradient * this->scale;
    add[0] = g < Math(0) ? -g : g;
  }
  GPU_FN void finish_tensor(const Arguments& a, u32 t, const Math (&totals)[1]) {
    if (!a.gradients[t]) return;
    const Math old = (Math)a.grad_norms[t];
    a.grad_norms[t] = (float)(old < Math(0) ? totals[0] : (Math)a.beta2 * old + (Math)a.one_minus_beta2 * totals[0]);
  }
};

// What a step's elements share.
template <class Math> struct NovogradScalars {
  Math lr, gradient_share, eps, decay, scale;
  Math correction1, correction2;  // 1 / (1 - beta1^step), 1 / sqrt(1 - beta2^step)

  GPU_FN void set(const NovogradArguments& a) {
    const u32 step = (u32)(a.step_on_device ? *a.step_on_device + a.step_offset : a.step);
    const bool correct = a.bias_correction;
    lr = a.lr_on_device ? (Math)*a.lr_on_device : (Math)a.lr;
    gradient_share = a.grad_averaging ? (Math)(1.0 - a.beta1) : Math(1);
    eps = (Math)a.eps;
    decay = (Math)a.weight_decay;
    scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    correction1 = correct ? (Math)(1.0 / (1.0 - integer_power(a.beta1, step))) : Math(1);
    correction2 = correct ? (Math)(1.0 / sqrt(1.0 - integer_power(a.beta2, step))) : Math(1);
  }
};

// Second launch.
template <class Math> struct NovogradUpdate : ElementwiseOperation {
  using Arguments = NovogradArguments;
  static constexpr int lists = 3, unroll = 1;
  static constexpr u32 read = 0b111, written = 0b110;
#if defined(GPU_HOST)
  NovogradScalars<Math> own;
#endif
  const NovogradScalars<Math>* s;  // in shared memory: only what a tensor needs takes registers
  // Of the tensor: shares of gradient and parameter in the average; what is kept of the parameter.
  Math beta1, gradient_share, l2_share, step_size, keep;

  GPU_FN bool begin(const Arguments& a) {
    if (novograd_is_skipped(a)) return false;
#if defined(GPU_HOST)
    own.set(a);
    s = &own;
#else
    GPU_SHARED(NovogradScalars<Math>, shared, 1);  // double arithmetic: one thread a block does it
    if (thread_x() == 0) shared[0].set(a);
    sync_threads();
    s = shared;
#endif
    return true;
  }
  GPU_FN void tensor(const Arguments& a, u32 t) {
    const Math inverse = Math(1) / fma((Math)a.grad_norms[t], s->correction2, s->eps);
    const bool inside = a.moment_mode == novograd_inside;
    beta1 = (Math)a.beta1;
    gradient_share = s->gradient_share * s->scale * (inside ? inverse : Math(1));
    l2_share = inside ? s->gradient_share * s->decay : Math(0);
    step_size = s->lr * s->correction1 * (inside ? Math(1) : inverse);
    keep = inside ? Math(1) : Math(1) - s->lr * s->decay;
  }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& exp_avg) {
    exp_avg = fma(beta1, exp_avg, fma(l2_share, parameter, gradient * gradient_share));
    parameter = fma(parameter, keep, -step_size * exp_avg);
  }
};

// The launch after it, where gradients are to be left unscaled.
template <class Math> struct NovogradUnscale : UnscaleGradients<Math, NovogradArguments> {
  GPU_FN bool begin(const NovogradArguments& a) {
    if (novograd_is_skipped(a)) return false;
    this->scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    return true;
  }
};
}  // namespace gpu

// First launch: V(name, arithmetic, gradient)
#define MULTI_TENSOR_NOVOGRAD_NORMS(V) \
  V(f32, float, float)                 \
  V(f16, float, gpu::half)             \
  V(bf16, float, gpu::bfloat16)        \
  V(f64, double, double)
// Second: V(name, arithmetic, gradient, parameter, exp_avg). Averages are float (double for double parameters), or of
// the parameter's type, as public apex keeps them.
#define MULTI_TENSOR_NOVOGRAD(V)                                        \
  V(f32_f32_f32, float, float, float, float)                            \
  V(f16_f32_f32, float, gpu::half, float, float)                        \
  V(bf16_f32_f32, float, gpu::bfloat16, float, float)                   \
  V(f16_f16_f32, float, gpu::half, gpu::half, float)                    \
  V(f16_f16_f16, float, gpu::half, gpu::half, gpu::half)                \
  V(f32_f16_f32, float, float, gpu::half, float)                        \
  V(bf16_bf16_f32, float, gpu::bfloat16, gpu::bfloat16, float)          \
  V(bf16_bf16_bf16, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16) \
  V(f32_bf16_f32, float, float, gpu::bfloat16, float)                   \
  V(f64_f64_f64, double, double, double, double)
