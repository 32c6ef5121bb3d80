// output = a * x + b * y over lists of tensors; notes whether the inputs asked for held an inf or nan.
#pragma once
#include "multi_tensor.h"

namespace gpu {
enum AxpbyCheck : i32 { axpby_check_both = -1, axpby_check_x = 0, axpby_check_y = 1 };

struct AxpbyArguments {
  double a, b;
  const float* a_on_device;  // replaces `a` if not null (a loss scale's inverse that never visits the host)
  i32* noop_flag;            // set to 1 if a checked input is not finite; may be null
  i32 check;                 // AxpbyCheck
  i32 reserved;
};

template <class Math> struct AxpbyUpdate : ElementwiseOperation {
  using Arguments = AxpbyArguments;
  static constexpr int lists = 3, unroll = 2;
  static constexpr u32 read = 0b011, written = 0b100;
  Math a, b;
  u32 check_x, check_y, not_finite;

  GPU_FN bool begin(const Arguments& arguments) {
    a = arguments.a_on_device ? (Math)*arguments.a_on_device : (Math)arguments.a;
    b = (Math)arguments.b;
    check_x = arguments.check != axpby_check_y;
    check_y = arguments.check != axpby_check_x;
    not_finite = 0;
    return true;
  }
  GPU_FN void update(const Math& x, const Math& y, Math& output) {
    not_finite |= (check_x & (u32)!is_finite(x)) | (check_y & (u32)!is_finite(y));
    output = fma(a, x, b * y);  // last: it may be the memory of an input
  }
  GPU_FN void end(const Arguments& arguments) {
    if (not_finite && arguments.noop_flag) raise_flag(arguments.noop_flag);
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, x, y, output)
#define MULTI_TENSOR_AXPBY(V)                                                        \
  V(f32_f32_f32, AxpbyUpdate, float, float, float, float)                            \
  V(f32_f32_f16, AxpbyUpdate, float, float, float, gpu::half)                        \
  V(f32_f32_bf16, AxpbyUpdate, float, float, float, gpu::bfloat16)                   \
  V(f32_f16_f32, AxpbyUpdate, float, float, gpu::half, float)                        \
  V(f32_f16_f16, AxpbyUpdate, float, float, gpu::half, gpu::half)                    \
  V(f32_f16_bf16, AxpbyUpdate, float, float, gpu::half, gpu::bfloat16)               \
  V(f32_bf16_f32, AxpbyUpdate, float, float, gpu::bfloat16, float)                   \
  V(f32_bf16_f16, AxpbyUpdate, float, float, gpu::bfloat16, gpu::half)               \
  V(f32_bf16_bf16, AxpbyUpdate, float, float, gpu::bfloat16, gpu::bfloat16)          \
  V(f16_f32_f32, AxpbyUpdate, float, gpu::half, float, float)                        \
  V(f16_f32_f16, AxpbyUpdate, float, gpu::half, float, gpu::half)                    \
  V(f16_f32_bf16, AxpbyUpdate, float, gpu::half, float, gpu::bfloat16)               \
  V(f16_f16_f32, AxpbyUpdate, float, gpu::half, gpu::half, float)                    \
  V(f16_f16_f16, AxpbyUpdate, float, gpu::half, gpu::half, gpu::half)                \
  V(f16_f16_bf16, AxpbyUpdate, float, gpu::half, gpu::half, gpu::bfloat16)           \
  V(f16_bf16_f32, AxpbyUpdate, float, gpu::half, gpu::bfloat16, float)               \
  V(f16_bf16_f16, AxpbyUpdate, float, gpu::half, gpu::bfloat16, gpu::half)           \
  V(f16_bf16_bf16, AxpbyUpdate, float, gpu::half, gpu::bfloat16, gpu::bfloat16)      \
  V(bf16_f32_f32, AxpbyUpdate, float, gpu::bfloat16, float, float)                   \
  V(bf16_f32_f16, AxpbyUpdate, float, gpu::bfloat16, float, gpu::half)               \
  V(bf16_f32_bf16, AxpbyUpdate, float, gpu::bfloat16, float, gpu::bfloat16)          \
  V(bf16_f16_f32, AxpbyUpdate, float, gpu::bfloat16, gpu::half, float)               \
  V(bf16_f16_f16, AxpbyUpdate, float, gpu::bfloat16, gpu::half, gpu::half)           \
  V(bf16_f16_bf16, AxpbyUpdate, float, gpu::bfloat16, gpu::half, gpu::bfloat16)      \
  V(bf16_bf16_f32, AxpbyUpdate, float, gpu::bfloat16, gpu::bfloat16, float)          \
  V(bf16_bf16_f16, AxpbyUpdate, float, gpu::bfloat16, gpu::bfloat16, gpu::half)      \
  V(bf16_bf16_bf16, AxpbyUpdate, float, gpu::bfloat16, gpu::bfloat16, gpu::bfloat16) \
  V(f64_f64_f64, AxpbyUpdate, double, double, double, double)
