// Adadelta over lists of tensors (Zeiler 2012, arXiv:1212.5701). Lists: gradient, parameter, average of squared
// gradients, average of squared updates.
#pragma once
#include "multi_tensor.h"

namespace gpu {
struct AdadeltaArguments {
  double lr, rho, eps, weight_decay;
  // All nullable; each replaces or joins a value above.
  const float* lr_on_device;
  const float* inv_scale;  // gradients are multiplied by it first
  const float* found_inf;  // not zero: the launch leaves everything as it is
  const i32* noop_flag;    // likewise
};

template <class Math> struct AdadeltaUpdate : ElementwiseOperation {
  using Arguments = AdadeltaArguments;
  static constexpr int lists = 4, unroll = 1;
  static constexpr u32 read = 0b1111, written = 0b1110;
  Math lr, rho, one_minus_rho, eps, decay, scale;

  GPU_FN bool begin(const Arguments& a) {
    if ((a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0)) return false;
    lr = a.lr_on_device ? (Math)*a.lr_on_device : (Math)a.lr;
    rho = (Math)a.rho;
    one_minus_rho = (Math)(1.0 - a.rho);
    eps = (Math)a.eps;
    decay = (Math)a.weight_decay;
    scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    return true;
  }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& square_avg, Math& acc_delta) {
    const Math g = fma(decay, parameter, gradient * scale);
    square_avg = fma(rho, square_avg, one_minus_rho * (g * g));
    const Math delta = sqrt((acc_delta + eps) / (square_avg + eps)) * g;
    parameter = fma(-lr, delta, parameter);
    acc_delta = fma(rho, acc_delta, one_minus_rho * (delta * delta));
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, gradient, parameter, square_avg, acc_delta)
#define MULTI_TENSOR_ADADELTA(V)                                        \
  V(f32_f32_f32_f32, AdadeltaUpdate, float, float, float, float, float) \
  V(f64_f64_f64_f64, AdadeltaUpdate, double, double, double, double, double)
