// RMSprop over lists of tensors (Hinton 2012, lecture 6e; centered: Graves 2013, arXiv:1308.0850), as
// torch.optim.RMSprop has it and, by options, as TensorFlow does. Lists: gradient, parameter, average of squared
// gradients[, average of gradients]
// [, momentum buffer].
#pragma once
#include "multi_tensor.h"

namespace gpu {
struct RmspropArguments {
  double lr, alpha, eps, weight_decay, momentum;
  i32 centered;         // there is a list of averages of gradients
  i32 eps_inside;       // eps joins what is under the root, not the root
  i32 decoupled_decay;  // parameters are multiplied by 1 - weight_decay first; else an L2 penalty
  i32 lr_in_momentum;   // the learning rate multiplies what goes into the buffer, not what comes out
  // All nullable; each replaces or joins a value above.
  const float* lr_on_device;
  const float* inv_scale;  // gradients are multiplied by it first
  const float* found_inf;  // not zero: the launch leaves everything as it is
  const i32* noop_flag;    // likewise
};

template <class Math> struct RmspropScalars {
  Math lr, alpha, one_minus_alpha, eps_inside, eps_outside, keep, l2, momentum, scale;
  Math into_buffer, out_of_buffer;  // one of them is lr, the other 1

  GPU_FN bool set(const RmspropArguments& a) {
    if ((a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0)) return false;
    lr = a.lr_on_device ? (Math)*a.lr_on_device : (Math)a.lr;
    alpha = (Math)a.alpha;
    one_minus_alpha = (Math)(1.0 - a.alpha);
    eps_inside = a.eps_inside ? (Math)a.eps : Math(0);
    eps_outside = a.eps_inside ? Math(0) : (Math)a.eps;
    keep = a.decoupled_decay ? (Math)(1.0 - a.weight_decay) : Math(1);
    l2 = a.decoupled_decay ? Math(0) : (Math)a.weight_decay;
    momentum = (Math)a.momentum;
    scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    into_buffer = a.lr_in_momentum ? lr : Math(1);
    out_of_buffer = a.lr_in_momentum ? Math(1) : lr;
    return true;
  }
  // The gradient with decay, which then is gathered.
  GPU_FN Math gather(Math gradient, Math parameter, Math& square_avg) const {
    const Math g = fma(l2, parameter, gradient * scale);
    square_avg = fma(alpha, square_avg, one_minus_alpha * g * g);
    return g;
  }
  GPU_FN Math divided(Math g, Math square) const { return g / (sqrt(square + eps_inside) + eps_outside); }
  GPU_FN Math centered_square(Math g, Math square_avg, Math& grad_avg) const {
    grad_avg = fma(alpha, grad_avg, one_minus_alpha * g);
    return fma(-grad_avg, grad_avg, square_avg);
  }
  GPU_FN void apply(Math step, Math& parameter) const { parameter = fma(-lr, step, parameter * keep); }
  GPU_FN void apply(Math step, Math& parameter, Math& buffer) const {
    buffer = fma(momentum, buffer, into_buffer * step);
    parameter = fma(-out_of_buffer, buffer, parameter * keep);
  }
};

template <class Math> struct RmspropUpdate : ElementwiseOperation {
  using Arguments = RmspropArguments;
  static constexpr int lists = 3, unroll = 1;
  static constexpr u32 read = 0b111, written = 0b110;
  RmspropScalars<Math> s;

  GPU_FN bool begin(const Arguments& a) { return s.set(a); }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& square_avg) {
    const Math g = s.gather(gradient, parameter, square_avg);
    s.apply(s.divided(g, square_avg), parameter);
  }
};

template <class Math> struct RmspropMomentumUpdate : RmspropUpdate<Math> {
  static constexpr int lists = 4;
  static constexpr u32 read = 0b1111, written = 0b1110;
  GPU_FN void update(const Math& gradient, Math& parameter, Math& square_avg, Math& buffer) {
    const auto& s = this->s;
    const Math g = s.gather(gradient, parameter, square_avg);
    s.apply(s.divided(g, square_avg), parameter, buffer);
  }
};

template <class Math> struct RmspropCenteredUpdate : RmspropUpdate<Math> {
  static constexpr int lists = 4;
  static constexpr u32 read = 0b1111, written = 0b1110;
  GPU_FN void update(const Math& gradient, Math& parameter, Math& square_avg, Math& grad_avg) {
    const auto& s = this->s;
    const Math g = s.gather(gradient, parameter, square_avg);
    s.apply(s.divided(g, s.centered_square(g, square_avg, grad_avg)), parameter);
  }
};

template <class Math> struct RmspropCenteredMomentumUpdate : RmspropUpdate<Math> {
  static constexpr int lists = 5;
  static constexpr u32 read = 0b11111, written = 0b11110;
  GPU_FN void update(const Math& gradient, Math& parameter, Math& square_avg, Math& grad_avg, Math& buffer) {
    const auto& s = this->s;
    const Math g = s.gather(gradient, parameter, square_avg);
    s.apply(s.divided(g, s.centered_square(g, square_avg, grad_avg)), parameter, buffer);
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, gradient, parameter, square_avg[, grad_avg][, momentum buffer]): what is not centered,
// and what is; both with four lists of the same types, so that these alone do not tell.
#define MULTI_TENSOR_RMSPROP(V)                                                         \
  V(f32_f32_f32, RmspropUpdate, float, float, float, float)                             \
  V(f64_f64_f64, RmspropUpdate, double, double, double, double)                         \
  V(momentum_f32_f32_f32_f32, RmspropMomentumUpdate, float, float, float, float, float) \
  V(momentum_f64_f64_f64_f64, RmspropMomentumUpdate, double, double, double, double, double)
#define MULTI_TENSOR_RMSPROP_CENTERED(V)                                                                            \
  V(centered_f32_f32_f32_f32, RmspropCenteredUpdate, float, float, float, float, float)                             \
  V(centered_f64_f64_f64_f64, RmspropCenteredUpdate, double, double, double, double, double)                        \
  V(centered_momentum_f32_f32_f32_f32_f32, RmspropCenteredMomentumUpdate, float, float, float, float, float, float) \
  V(centered_momentum_f64_f64_f64_f64_f64, RmspropCenteredMomentumUpdate, double, double, double, double, double,   \
    double)
