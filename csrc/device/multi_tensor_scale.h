// output = scale * input over lists of tensors; notes whether an input was inf or nan.
#pragma once
#include "multi_tensor.h"

namespace gpu {
struct ScaleArguments {
  double scale;
  const float* scale_on_device;  // replaces `scale` if not null (a clip coefficient that never visits the host)
  i32* noop_flag;                // set to 1 if an input or a result is not finite; may be null
  i32 skip_one;                  // 1: a scale of exactly 1 leaves everything as it is, unread (scaling in place)
  i32 reserved;
};

template <class Math> struct ScaleUpdate : ElementwiseOperation {
  using Arguments = ScaleArguments;
  static constexpr int lists = 2, unroll = 2;
  static constexpr u32 read = 0b01, written = 0b10;
  Math scale;
  u32 not_finite;

  GPU_FN bool begin(const Arguments& a) {
    scale = a.scale_on_device ? (Math)*a.scale_on_device : (Math)a.scale;
    not_finite = 0;
    return !(a.skip_one && scale == Math(1));
  }
  GPU_FN void update(const Math& input, Math& output) {
    output = input * scale;
    not_finite |= !is_finite(input) | !is_finite(output);
  }
  GPU_FN void end(const Arguments& a) {
    if (not_finite && a.noop_flag) raise_flag(a.noop_flag);
  }
};
}  // namespace gpu

// Every variant once, for the kernels and for the host: V(name, operation, arithmetic, input, output).
#define MULTI_TENSOR_SCALE(V)                                    \
  V(f32_f32, ScaleUpdate, float, float, float)                   \
  V(f32_f16, ScaleUpdate, float, float, gpu::half)               \
  V(f32_bf16, ScaleUpdate, float, float, gpu::bfloat16)          \
  V(f16_f32, ScaleUpdate, float, gpu::half, float)               \
  V(f16_f16, ScaleUpdate, float, gpu::half, gpu::half)           \
  V(f16_bf16, ScaleUpdate, float, gpu::half, gpu::bfloat16)      \
  V(bf16_f32, ScaleUpdate, float, gpu::bfloat16, float)          \
  V(bf16_f16, ScaleUpdate, float, gpu::bfloat16, gpu::half)      \
  V(bf16_bf16, ScaleUpdate, float, gpu::bfloat16, gpu::bfloat16) \
  V(f64_f64, ScaleUpdate, double, double, double)
