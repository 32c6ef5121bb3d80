// Adam and AdamW over lists of tensors (Kingma & Ba 2014, arXiv:1412.6980; Loshchilov & Hutter 2017,
// arXiv:1711.05101). Lists: gradient, parameter, exp_avg, exp_avg_sq and, optionally, a lower-precision
// model copy of the parameter, written from the master that list 1 then holds.
#pragma once
#include "multi_tensor_unscale.h"

namespace gpu {
enum AdamMode : i32 { adam_l2 = 0, adam_decoupled = 1 };

struct AdamArguments {
  double lr, beta1, beta2, eps, weight_decay;
  i32 step;             // 1 at the first step
  i32 mode;             // AdamMode
  i32 bias_correction;  // 0 or 1
  i32 step_offset;      // added to step_on_device: 1 where that still holds the last step
  i32 advance_step;     // write the step that was used back to step_on_device
  i32 unscale_grads;    // a second launch leaves gradients multiplied by inv_scale
  // All nullable; each replaces a value above, so that a captured graph sees what it holds at replay.
  const float* lr_on_device;
  i32* step_on_device;
  u32* blocks_done;        // a zeroed counter, for advance_step
  const float* inv_scale;  // gradients are multiplied by it first
  const float* found_inf;  // not zero: the launch leaves everything as it is
  const i32* noop_flag;    // 1: likewise
};

// What a step's elements share. Betas come as double: rounding 0.999 to float alone would put 1 - beta2
// off by 1.3e-5, relative.
template <class Math> struct AdamScalars {
  Math beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  Math keep;         // 1 - lr * weight_decay where decay is decoupled, else 1
  Math l2;           // weight_decay where it is an L2 penalty, else 0
  Math step_size;    // lr / (1 - beta1^step)
  Math denominator;  // 1 / sqrt(1 - beta2^step)
  Math inv_scale;

  GPU_FN void set(const AdamArguments& a, double lr, i32 step) {
    const double correction1 = a.bias_correction ? 1.0 - integer_power(a.beta1, (u32)step) : 1.0;
    const double correction2 = a.bias_correction ? 1.0 - integer_power(a.beta2, (u32)step) : 1.0;
    beta1 = (Math)a.beta1;
    beta2 = (Math)a.beta2;
    one_minus_beta1 = (Math)(1.0 - a.beta1);
    one_minus_beta2 = (Math)(1.0 - a.beta2);
    eps = (Math)a.eps;
    keep = a.mode == adam_decoupled ? (Math)(1.0 - lr * a.weight_decay) : Math(1);
    l2 = a.mode == adam_decoupled ? Math(0) : (Math)a.weight_decay;
    step_size = (Math)(lr / correction1);
    denominator = (Math)(1.0 / sqrt(correction2));
    inv_scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
  }
};

template <class Math> struct AdamUpdate : ElementwiseOperation {
  using Arguments = AdamArguments;
  static constexpr int lists = 4, unroll = 1;
  static constexpr u32 read = 0b1111, written = 0b1110;
  AdamScalars<Math> s;

  static GPU_FN bool skipped(const Arguments& a) {
    return (a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag == 1);
  }
#if defined(GPU_HOST)
  static void after_cpu(const Arguments& a) {
    if (a.step_on_device && a.advance_step && !skipped(a)) *a.step_on_device += a.step_offset;
  }
#endif
  GPU_FN bool begin(const Arguments& a) {
    if (skipped(a)) return false;
#if defined(GPU_HOST)
    const i32 step = a.step_on_device ? *a.step_on_device + a.step_offset : a.step;
    s.set(a, a.lr_on_device ? (double)*a.lr_on_device : a.lr, step);
#else
    // The powers are double arithmetic, slow on many cards: one thread a block does them.
    GPU_SHARED(AdamScalars<Math>, shared, 1);
    if (thread_x() == 0) {
      i32 step = a.step;
      if (a.step_on_device) step = *a.step_on_device + a.step_offset;
      shared[0].set(a, a.lr_on_device ? (double)*a.lr_on_device : a.lr, step);
      if (a.step_on_device && a.advance_step) {
        device_fence();
        // The last block to have read the old step writes the new one.
        if (atomic_increment(a.blocks_done) == grid_x() - 1) {
          *a.blocks_done = 0;
          *a.step_on_device = step;
        }
      }
    }
    sync_threads();
    s = shared[0];
#endif
    return true;
  }
  GPU_FN void update(const Math& gradient, Math& parameter, Math& exp_avg, Math& exp_avg_sq) {
    const Math g = fma(s.l2, parameter, gradient * s.inv_scale);
    exp_avg = fma(s.beta1, exp_avg, s.one_minus_beta1 * g);
    exp_avg_sq = fma(s.beta2, exp_avg_sq, s.one_minus_beta2 * g * g);
    const Math divisor = fma(sqrt(exp_avg_sq), s.denominator, s.eps);
    parameter = fma(parameter, s.keep, -s.step_size * (exp_avg / divisor));
  }
};

// With a model copy: the arithmetic is the master's, the copy is rounded from the result.
template <class Math> struct AdamMasterUpdate : AdamUpdate<Math> {
  static constexpr int lists = 5;
  static constexpr u32 read = 0b01111, written = 0b11110;
  GPU_FN void update(const Math& gradient, Math& master, Math& exp_avg, Math& exp_avg_sq, Math& model) {
    AdamUpdate<Math>::update(gradient, master, exp_avg, exp_avg_sq);
    model = master;
  }
};

// The launch after it, where gradients are to be left unscaled.
template <class Math> struct AdamUnscale : UnscaleGradients<Math, AdamArguments> {
  GPU_FN bool begin(const AdamArguments& a) {
    if (AdamUpdate<Math>::skipped(a)) return false;
    this->scale = a.inv_scale ? (Math)*a.inv_scale : Math(1);
    return true;
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, gradient, parameter, exp_avg, exp_avg_sq[, model]). Moments are float, or
// double with double parameters (float with those too: public apex's lists of fp64 are such).
#define MULTI_TENSOR_ADAM(V)                                                                      \
  V(f32_f32, AdamUpdate, float, float, float, float, float)                                       \
  V(f16_f32, AdamUpdate, float, gpu::half, float, float, float)                                   \
  V(bf16_f32, AdamUpdate, float, gpu::bfloat16, float, float, float)                              \
  V(f16_f16, AdamUpdate, float, gpu::half, gpu::half, float, float)                               \
  V(f32_f16, AdamUpdate, float, float, gpu::half, float, float)                                   \
  V(bf16_bf16, AdamUpdate, float, gpu::bfloat16, gpu::bfloat16, float, float)                     \
  V(f32_bf16, AdamUpdate, float, float, gpu::bfloat16, float, float)                              \
  V(f64_f64, AdamUpdate, double, double, double, double, double)                                  \
  V(f64_f64_f32, AdamUpdate, double, double, double, float, float)                                \
  V(f32_master_f32, AdamMasterUpdate, float, float, float, float, float, float)                   \
  V(f16_master_f16, AdamMasterUpdate, float, gpu::half, float, float, float, gpu::half)           \
  V(f32_master_f16, AdamMasterUpdate, float, float, float, float, float, gpu::half)               \
  V(bf16_master_bf16, AdamMasterUpdate, float, gpu::bfloat16, float, float, float, gpu::bfloat16) \
  V(f32_master_bf16, AdamMasterUpdate, float, float, float, float, float, gpu::bfloat16)
