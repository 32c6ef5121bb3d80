// The first half of LAMB as public apex splits it: moments and updates, each tensor with its own decay, or
// with all scalars of its own, and the norms that the second half scales by. See multi_tensor_lamb.h for the formula.
#pragma once
#include "multi_tensor_lamb.h"

namespace gpu {
// Lists: gradient, parameter, exp_avg, exp_avg_sq, update.
template <class Math> struct LambStage1 : ElementwiseOperation {
  using Arguments = LambArguments;
  using Reduction = Sum;
  static constexpr int lists = 5, unroll = 1, reductions = 2;
  static constexpr u32 read = 0b01111, written = 0b11100;
  LambMoments<Math> moments;

  GPU_FN bool begin(const Arguments& a) { return moments.begin(a); }
  GPU_FN void tensor(const Arguments& a, u32 t) {
    if (a.per_tensor_beta1) set_averages(a, t);
    (a.mode == lamb_l2 ? moments.s.l2 : moments.s.decay) = (Math)a.per_tensor_decay[t];
  }
  // Memory is what bounds it, so that norms nobody asked for cost nothing: they have no kernels of their own.
  GPU_FN void update(const Math& gradient, const Math& parameter, Math& exp_avg, Math& exp_avg_sq, Math& update,
                     Math (&add)[2]) {
    update = moments.s.update(gradient, parameter, exp_avg, exp_avg_sq);
    add[0] = parameter * parameter;
    add[1] = update * update;
  }
  GPU_FN void finish_tensor(const Arguments& a, u32 t, const Math (&totals)[2]) {
    if (!a.parameter_norms) return;
    a.parameter_norms[t] = (float)sqrt(totals[0]);
    a.update_norms[t] = (float)sqrt(totals[1]);
  }
  GPU_FN void finish(const Arguments&, const Math (&)[2]) {}

 private:
  GPU_FN void set_averages(const Arguments& a, u32 t) {
    const auto set = [&](LambScalars<Math>& s) {
      s.set_averages(a.per_tensor_beta1[t], a.per_tensor_gradient_share[t], a.per_tensor_beta2[t], a.per_tensor_eps[t],
                     a.per_tensor_bias_correction[t] != 0.0f, lamb_step(a));
    };
#if defined(GPU_HOST)
    set(moments.s);
#else
    GPU_SHARED(LambScalars<Math>, shared, 1);  // double arithmetic: one thread a block does it
    sync_threads();                            // all have those of the tensor before
    if (thread_x() == 0) {
      shared[0] = moments.s;
      set(shared[0]);
    }
    sync_threads();
    moments.s = shared[0];
#endif
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, gradient, parameter, exp_avg, exp_avg_sq, update); moments have the parameter's type.
#define MULTI_TENSOR_LAMB_STAGE1(V)                                                                      \
  V(f32_f32_f32, LambStage1, float, float, float, float, float, float)                                   \
  V(f32_f32_f16, LambStage1, float, float, float, float, float, gpu::half)                               \
  V(f32_f32_bf16, LambStage1, float, float, float, float, float, gpu::bfloat16)                          \
  V(f16_f32_f32, LambStage1, float, gpu::half, float, float, float, float)                               \
  V(f16_f32_f16, LambStage1, float, gpu::half, float, float, float, gpu::half)                           \
  V(bf16_f32_f32, LambStage1, float, gpu::bfloat16, float, float, float, float)                          \
  V(bf16_f32_bf16, LambStage1, float, gpu::bfloat16, float, float, float, gpu::bfloat16)                 \
  V(f32_f16_f32, LambStage1, float, float, gpu::half, gpu::half, gpu::half, float)                       \
  V(f32_f16_f16, LambStage1, float, float, gpu::half, gpu::half, gpu::half, gpu::half)                   \
  V(f16_f16_f32, LambStage1, float, gpu::half, gpu::half, gpu::half, gpu::half, float)                   \
  V(f16_f16_f16, LambStage1, float, gpu::half, gpu::half, gpu::half, gpu::half, gpu::half)               \
  V(f32_bf16_f32, LambStage1, float, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16, float)          \
  V(f32_bf16_bf16, LambStage1, float, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16) \
  V(bf16_bf16_f32, LambStage1, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16, float) \
  V(bf16_bf16_bf16, LambStage1, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16)
