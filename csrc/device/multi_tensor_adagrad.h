// Adagrad over lists of tensors (Duchi, Hazan & Singer 2011, JMLR 12). Lists: gradient, parameter, sum of squares.
#pragma once
#include "multi_tensor_unscale.h"

namespace gpu {
enum AdagradMode : i32 { adagrad_l2 = 0, adagrad_decoupled = 1 };

struct AdagradArguments {
  double lr, eps, weight_decay;
  i32 mode;           // AdagradMode
  i32 unscale_grads;  // a second launch leaves gradients multiplied by inv_scale
  // All nullable; each replaces or joins a value above.
  const float* lr_on_device;
  const float* inv_scale;  // gradients are multiplied by it first
  const float* found_inf;  // not zero: the launch leaves everything as it is
  const i32* noop_flag;    // likewise
};

template <class Math> struct AdagradUpdate : ElementwiseOperation {
  using Arguments = AdagradArguments;
  static constexpr int lists = 3, unroll = 1;
  static constexpr u32 read = 0b111, written = 0b110;
  Math lr, eps, scale;
  Math keep;  // 1 - lr * weight_decay where decay is decoupled, else 1
  Math l2;    // weight_decay where it is an L2 penalty, else 0

  GPU_FN bool begin(const Arguments& a) {
    if ((a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0)) return false;
    lr = a.lr_on_device ? (Math)*a.lr_on_device : (Math)a.lr;
    eps = (Math)a.eps;
    scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    keep = a.mode == adagrad_decoupled ? Math(1) - lr * (Math)a.weight_decay : Math(1);
    l2 = a.mode == adagrad_decoupled ? Math(0) : (Math)a.weight_decay;
    return true;
  }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& sum) {
    const Math g = fma(l2, parameter, gradient * scale);
    sum = fma(g, g, sum);
    parameter = fma(parameter, keep, -lr * (g / (sqrt(sum) + eps)));
  }
};

// The launch after it, where gradients are to be left unscaled.
template <class Math> struct AdagradUnscale : UnscaleGradients<Math, AdagradArguments> {
  GPU_FN bool begin(const AdagradArguments& a) {
    if ((a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0)) return false;
    this->scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    return true;
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, gradient, parameter, sum). Sums are float (double for double parameters), or of the
// parameter's type, as public apex keeps them.
#define MULTI_TENSOR_ADAGRAD(V)                                                        \
  V(f32_f32_f32, AdagradUpdate, float, float, float, float)                            \
  V(f16_f32_f32, AdagradUpdate, float, gpu::half, float, float)                        \
  V(bf16_f32_f32, AdagradUpdate, float, gpu::bfloat16, float, float)                   \
  V(f16_f16_f32, AdagradUpdate, float, gpu::half, gpu::half, float)                    \
  V(f16_f16_f16, AdagradUpdate, float, gpu::half, gpu::half, gpu::half)                \
  V(f32_f16_f32, AdagradUpdate, float, float, gpu::half, float)                        \
  V(bf16_bf16_f32, AdagradUpdate, float, gpu::bfloat16, gpu::bfloat16, float)          \
  V(bf16_bf16_bf16, AdagradUpdate, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16) \
  V(f32_bf16_f32, AdagradUpdate, float, float, gpu::bfloat16, float)                   \
  V(f64_f64_f64, AdagradUpdate, double, double, double, double)
