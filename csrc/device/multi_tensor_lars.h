// LARS over lists of tensors (You, Gitman & Ginsburg 2017, arXiv:1708.03888), in two launches: the first measures
// every gradient and parameter, the second updates, each tensor by a learning rate of its own. Lists: gradient,
// parameter, momentum buffer and, optionally, a lower-precision model copy of the parameter.
#pragma once
#include "multi_tensor_reduce.h"
#include "multi_tensor_unscale.h"

namespace gpu {
struct LarsArguments {
  double lr, trust_coefficient, eps, weight_decay, momentum;
  double scale;  // gradients are multiplied by it first
  i32 nesterov;
  i32 is_skipped;            // one learning rate for all: plain descent
  u32 tensors;               // of the table
  i32 unscale_grads;         // a third launch leaves gradients multiplied by both scales
  const double* totals;      // sums of squares that the first launch left, [gradients | parameters][tensors]; or null:
  const float* grad_norms;   // [tensors]: norms from elsewhere (of scaled gradients)
  const float* param_norms;  // [tensors]
  // All nullable; each replaces or joins a value above.
  const float* lr_on_device;
  const float* inv_scale;  // multiplies `scale`
  const float* found_inf;  // not zero: the launches leave everything as it is
  const i32* noop_flag;    // likewise
};

GPU_FN bool lars_is_skipped(const LarsArguments& a) {
  return (a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0);
}
template <class Math> GPU_FN Math lars_gradient_scale(const LarsArguments& a) {
  return (Math)a.scale * (a.inv_scale ? (Math)*a.inv_scale : Math(1));
}

// First launch, which sees gradients and parameters.
template <class Math> struct LarsNorms : ElementwiseOperation {
  using Arguments = LarsArguments;
  using Reduction = Sum;
  static constexpr int lists = 2, unroll = 1, reductions = 2;
  static constexpr u32 read = 0b11, written = 0b00;
  Math scale;

  GPU_FN bool begin(const Arguments& a) {
    if (lars_is_skipped(a)) return false;
    scale = lars_gradient_scale<Math>(a);
    return true;
  }
  GPU_FN void update(const Math& gradient, const Math& parameter, Math (&add)[2]) {
    const Math g = gradient * scale;
    add[0] = g * g;
    add[1] = parameter * parameter;
  }
  GPU_FN void finish_tensor(const Arguments&, u32, const Math (&)[2]) {}  // the second launch reads the totals
  GPU_FN void finish(const Arguments&, const Math (&)[2]) {}
};

// Second launch.
template <class Math> struct LarsUpdate : ElementwiseOperation {
  using Arguments = LarsArguments;
  static constexpr int lists = 3, unroll = 1;
  static constexpr u32 read = 0b111, written = 0b110;
  Math scale, decay, momentum, step_size;
  bool nesterov;

  GPU_FN bool begin(const Arguments& a) {
    if (lars_is_skipped(a)) return false;
    scale = lars_gradient_scale<Math>(a);
    decay = (Math)a.weight_decay;
    momentum = (Math)a.momentum;
    nesterov = a.nesterov;
    return true;
  }
  GPU_FN void tensor(const Arguments& a, u32 t) {
    step_size = a.lr_on_device ? (Math)*a.lr_on_device : (Math)a.lr;
    if (a.is_skipped) return;
    const Math* totals = reinterpret_cast<const Math*>(a.totals);
    const Math gradient = totals ? sqrt(totals[t]) : (Math)a.grad_norms[t];
    const Math parameter = totals ? sqrt(totals[a.tensors + t]) : (Math)a.param_norms[t];
    if (gradient > Math(0) && parameter > Math(0))
      step_size *= (Math)a.trust_coefficient * parameter / (fma(parameter, decay, gradient) + (Math)a.eps);
  }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& buffer) {
    const Math step = step_size * fma(decay, parameter, gradient * scale);
    buffer = fma(momentum, buffer, -step);
    parameter += nesterov ? fma(momentum, buffer, -step) : buffer;
  }
};

// With a model copy, rounded from the master that list 1 then holds.
template <class Math> struct LarsModelUpdate : LarsUpdate<Math> {
  static constexpr int lists = 4;
  static constexpr u32 read = 0b0111, written = 0b1110;
  GPU_FN void update(const Math& gradient, Math& master, Math& buffer, Math& model) {
    LarsUpdate<Math>::update(gradient, master, buffer);
    model = master;
  }
};

// The launch after it, where gradients are to be left unscaled.
template <class Math> struct LarsUnscale : UnscaleGradients<Math, LarsArguments> {
  GPU_FN bool begin(const LarsArguments& a) {
    if (lars_is_skipped(a)) return false;
    this->scale = lars_gradient_scale<Math>(a);
    return true;
  }
};
}  // namespace gpu

// First launch: V(name, operation, arithmetic, gradient, parameter)
#define MULTI_TENSOR_LARS_NORMS(V)                             \
  V(f32_f32, LarsNorms, float, float, float)                   \
  V(f16_f32, LarsNorms, float, gpu::half, float)               \
  V(bf16_f32, LarsNorms, float, gpu::bfloat16, float)          \
  V(f16_f16, LarsNorms, float, gpu::half, gpu::half)           \
  V(f32_f16, LarsNorms, float, float, gpu::half)               \
  V(bf16_bf16, LarsNorms, float, gpu::bfloat16, gpu::bfloat16) \
  V(f32_bf16, LarsNorms, float, float, gpu::bfloat16)          \
  V(f64_f64, LarsNorms, double, double, double)
// Second: V(name, operation, arithmetic, gradient, parameter, momentum buffer[, model copy]). Buffers are float (double
// for double parameters), or of the parameter's type, as public apex keeps them.
#define MULTI_TENSOR_LARS(V)                                                               \
  V(f32_f32_f32, LarsUpdate, float, float, float, float)                                   \
  V(f16_f32_f32, LarsUpdate, float, gpu::half, float, float)                               \
  V(bf16_f32_f32, LarsUpdate, float, gpu::bfloat16, float, float)                          \
  V(f16_f16_f32, LarsUpdate, float, gpu::half, gpu::half, float)                           \
  V(f16_f16_f16, LarsUpdate, float, gpu::half, gpu::half, gpu::half)                       \
  V(f32_f16_f32, LarsUpdate, float, float, gpu::half, float)                               \
  V(f32_f16_f16, LarsUpdate, float, float, gpu::half, gpu::half)                           \
  V(bf16_bf16_f32, LarsUpdate, float, gpu::bfloat16, gpu::bfloat16, float)                 \
  V(bf16_bf16_bf16, LarsUpdate, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16)        \
  V(f32_bf16_f32, LarsUpdate, float, float, gpu::bfloat16, float)                          \
  V(f32_bf16_bf16, LarsUpdate, float, float, gpu::bfloat16, gpu::bfloat16)                 \
  V(f64_f64_f64, LarsUpdate, double, double, double, double)                               \
  V(f16_f32_f32_f16, LarsModelUpdate, float, gpu::half, float, float, gpu::half)           \
  V(f32_f32_f32_f16, LarsModelUpdate, float, float, float, float, gpu::half)               \
  V(bf16_f32_f32_bf16, LarsModelUpdate, float, gpu::bfloat16, float, float, gpu::bfloat16) \
  V(f32_f32_f32_bf16, LarsModelUpdate, float, float, float, float, gpu::bfloat16)          \
  V(bf16_f32_f32_f16, LarsModelUpdate, float, gpu::bfloat16, float, float, gpu::half)
