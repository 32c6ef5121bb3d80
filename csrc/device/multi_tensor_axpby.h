// output = a * x + b * y over lists of tensors; notes whether the inputs asked for held an inf or nan.
#pragma once
#include "multi_tensor.h"

namespace gpu {
enum AxpbyCheck : i32 { axpby_check_both = -1, axpby_check_x = 0, axpby_check_y = 1 };

struct AxpbyArguments {
  double a, b;
  i32* noop_flag;  // set to 1 if a checked input is not finite; may be null
  i32 check;       // AxpbyCheck
  i32 reserved;
};

template <class Math> struct AxpbyUpdate : ElementwiseOperation {
  using Arguments = AxpbyArguments;
  static constexpr int lists = 3, unroll = 2;
  static constexpr u32 read = 0b011, written = 0b100;
  Math a, b;
  u32 check_x, check_y, not_finite;

  GPU_FN bool begin(const Arguments& arguments) {
    a = (Math)arguments.a;
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
#define MULTI_TENSOR_AXPBY_OUTPUTS(V, name, x, y)              \
  V(name##_f32, AxpbyUpdate, float, x, y, float)               \
  V(name##_f16, AxpbyUpdate, float, x, y, gpu::half)           \
  V(name##_bf16, AxpbyUpdate, float, x, y, gpu::bfloat16)
#define MULTI_TENSOR_AXPBY(V)                                              \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, f32_f32, float, float)                     \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, f32_f16, float, gpu::half)                 \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, f32_bf16, float, gpu::bfloat16)            \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, f16_f32, gpu::half, float)                 \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, f16_f16, gpu::half, gpu::half)             \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, f16_bf16, gpu::half, gpu::bfloat16)        \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, bf16_f32, gpu::bfloat16, float)            \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, bf16_f16, gpu::bfloat16, gpu::half)        \
  MULTI_TENSOR_AXPBY_OUTPUTS(V, bf16_bf16, gpu::bfloat16, gpu::bfloat16)   \
  V(f64_f64_f64, AxpbyUpdate, double, double, double, double)
