// The launch after an optimizer's update that leaves gradients unscaled. A kernel of its own: stores that a flag turns
// on would cost every update registers, whether or not there is a scale. It sees the gradients alone.
#pragma once
#include "multi_tensor.h"

namespace gpu {
// An optimizer's operation adds begin(arguments): false where its step was skipped, else `scale` is set.
template <class Math, class OfOptimizer> struct UnscaleGradients : ElementwiseOperation {
  using Arguments = OfOptimizer;
  static constexpr int lists = 1, unroll = 2;
  static constexpr u32 read = 0b1, written = 0b1;
  Math scale;

  GPU_FN void update(Math& gradient) { gradient *= scale; }
};
}  // namespace gpu

// V(name, operation, arithmetic, gradient)
#define MULTI_TENSOR_UNSCALE(V, Op)         \
  V(unscale_f32, Op, float, float)          \
  V(unscale_f16, Op, float, gpu::half)      \
  V(unscale_bf16, Op, float, gpu::bfloat16) \
  V(unscale_f64, Op, double, double)
