// Stochastic gradient descent over lists of tensors, with momentum as torch.optim.SGD and public apex have it:
// the buffer gathers gradients, and the learning rate multiplies what comes out of it. Lists: gradient, parameter,
// momentum buffer and, optionally, a lower-precision model copy of the parameter; or gradient and parameter alone.
#pragma once
#include "multi_tensor_unscale.h"

namespace gpu {
struct SgdArguments {
  double weight_decay, momentum, dampening, lr;
  double scale;  // gradients are multiplied by it first
  i32 nesterov;
  i32 first_run;          // momentum buffers are set to the gradients, whatever they hold
  i32 marked_first_run;   // likewise each element that is -0; no element is left so
  i32 wd_after_momentum;  // decay joins what comes out of the buffer, not what goes in
  // All nullable; each replaces or joins a value above.
  const float* lr_on_device;
  const float* inv_scale;  // multiplies `scale`
  const float* found_inf;  // not zero: the launch leaves everything as it is
  const i32* noop_flag;    // likewise
  i32 unscale_grads;       // a second launch leaves gradients multiplied by both scales
  i32 reserved;
};

GPU_FN bool is_negative_zero(float x) { return bit_cast<u32>(x) == 0x80000000u; }
GPU_FN bool is_negative_zero(double x) { return bit_cast<u64>(x) == 0x8000000000000000ull; }

// Gradient and parameter.
template <class Math> struct SgdUpdate : ElementwiseOperation {
  using Arguments = SgdArguments;
  static constexpr int lists = 2, unroll = 2;
  static constexpr u32 read = 0b11, written = 0b10;
  Math lr, decay, scale;

  GPU_FN bool begin(const Arguments& a) {
    if ((a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0)) return false;
    lr = a.lr_on_device ? (Math)*a.lr_on_device : (Math)a.lr;
    decay = (Math)a.weight_decay;
    scale = (Math)a.scale * (a.inv_scale ? (Math)*a.inv_scale : Math(1));
    return true;
  }
  GPU_FN void update(const Math& gradient, Math& parameter) {
    parameter = fma(-lr, fma(decay, parameter, gradient * scale), parameter);
  }
};

// The step is what the buffer, of type Buffer, holds in the end, as torch's and public apex's is.
template <class Math, class Buffer> struct SgdMomentum : SgdUpdate<Math> {
  using typename SgdUpdate<Math>::Arguments;
  static constexpr int lists = 3, unroll = 1;
  static constexpr u32 read = 0b111, written = 0b110;
  Math decay_before, decay_after, momentum, gradient_share;
  bool nesterov, first_run, marked;

  GPU_FN bool begin(const Arguments& a) {
    if (!SgdUpdate<Math>::begin(a)) return false;
    decay_before = a.wd_after_momentum ? Math(0) : this->decay;
    decay_after = a.wd_after_momentum ? this->decay : Math(0);
    momentum = (Math)a.momentum;
    gradient_share = (Math)(1.0 - a.dampening);
    nesterov = a.nesterov;
    first_run = a.first_run;
    marked = a.marked_first_run;
    return true;
  }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& buffer) {
    const Math g = fma(decay_before, parameter, gradient * this->scale);
    Math step = g;
    if (momentum != Math(0)) {  // else the buffer stays as it is
      const bool first = first_run || (marked && is_negative_zero(buffer));
      buffer = as_stored(first ? g : fma(momentum, buffer, gradient_share * g)) + Math(0);  // -0 becomes 0
      step = nesterov ? fma(momentum, buffer, g) : buffer;
    }
    parameter = fma(-this->lr, fma(decay_after, parameter, step), parameter);
  }
  static GPU_FN Math as_stored(Math x) {
    if constexpr (sizeof(Buffer) == sizeof(Math)) {
      return x;
    } else {
      Buffer stored;
      from_float(stored, (float)x);
      return (Math)to_float(stored);
    }
  }
};
template <class Math> using SgdMomentumUpdate = SgdMomentum<Math, Math>;
template <class Math> using SgdF16MomentumUpdate = SgdMomentum<Math, half>;
template <class Math> using SgdBf16MomentumUpdate = SgdMomentum<Math, bfloat16>;

// With a model copy, rounded from the master that list 1 then holds.
template <class Math> struct SgdMomentumModelUpdate : SgdMomentumUpdate<Math> {
  static constexpr int lists = 4;
  static constexpr u32 read = 0b0111, written = 0b1110;
  GPU_FN void update(const Math& gradient, Math& master, Math& buffer, Math& model) {
    SgdMomentumUpdate<Math>::update(gradient, master, buffer);
    model = master;
  }
};

// The launch after it, where gradients are to be left unscaled.
template <class Math> struct SgdUnscale : UnscaleGradients<Math, SgdArguments> {
  GPU_FN bool begin(const SgdArguments& a) {
    if ((a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0)) return false;
    this->scale = (Math)a.scale * (a.inv_scale ? (Math)*a.inv_scale : Math(1));
    return true;
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, gradient, parameter[, momentum buffer[, model copy]]). Buffers are float (double
// for double parameters), or of the parameter's type, as public apex keeps them.
#define MULTI_TENSOR_SGD(V)                                                                       \
  V(f32_f32, SgdUpdate, float, float, float)                                                      \
  V(f16_f32, SgdUpdate, float, gpu::half, float)                                                  \
  V(bf16_f32, SgdUpdate, float, gpu::bfloat16, float)                                             \
  V(f16_f16, SgdUpdate, float, gpu::half, gpu::half)                                              \
  V(f32_f16, SgdUpdate, float, float, gpu::half)                                                  \
  V(bf16_bf16, SgdUpdate, float, gpu::bfloat16, gpu::bfloat16)                                    \
  V(f32_bf16, SgdUpdate, float, float, gpu::bfloat16)                                             \
  V(f64_f64, SgdUpdate, double, double, double)                                                   \
  V(f32_f32_f32, SgdMomentumUpdate, float, float, float, float)                                   \
  V(f16_f32_f32, SgdMomentumUpdate, float, gpu::half, float, float)                               \
  V(bf16_f32_f32, SgdMomentumUpdate, float, gpu::bfloat16, float, float)                          \
  V(f16_f16_f32, SgdMomentumUpdate, float, gpu::half, gpu::half, float)                           \
  V(f16_f16_f16, SgdF16MomentumUpdate, float, gpu::half, gpu::half, gpu::half)                    \
  V(f32_f16_f32, SgdMomentumUpdate, float, float, gpu::half, float)                               \
  V(f32_f16_f16, SgdF16MomentumUpdate, float, float, gpu::half, gpu::half)                        \
  V(bf16_bf16_f32, SgdMomentumUpdate, float, gpu::bfloat16, gpu::bfloat16, float)                 \
  V(bf16_bf16_bf16, SgdBf16MomentumUpdate, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16)    \
  V(f32_bf16_f32, SgdMomentumUpdate, float, float, gpu::bfloat16, float)                          \
  V(f32_bf16_bf16, SgdBf16MomentumUpdate, float, float, gpu::bfloat16, gpu::bfloat16)             \
  V(f64_f64_f64, SgdMomentumUpdate, double, double, double, double)                               \
  V(f16_f32_f32_f16, SgdMomentumModelUpdate, float, gpu::half, float, float, gpu::half)           \
  V(f32_f32_f32_f16, SgdMomentumModelUpdate, float, float, float, float, gpu::half)               \
  V(bf16_f32_f32_bf16, SgdMomentumModelUpdate, float, gpu::bfloat16, float, float, gpu::bfloat16) \
  V(f32_f32_f32_bf16, SgdMomentumModelUpdate, float, float, float, float, gpu::bfloat16)          \
  V(bf16_f32_f32_f16, SgdMomentumModelUpdate, float, gpu::bfloat16, float, float, gpu::half)
