#include "multi_tensor_scale.h"

#define SCALE(name, In, Out) MULTI_TENSOR_KERNEL(multi_tensor_scale_##name, ScaleUpdate, float, In, Out)
SCALE(f32_f32, float, float)
SCALE(f32_f16, float, gpu::half)
SCALE(f32_bf16, float, gpu::bfloat16)
SCALE(f16_f32, gpu::half, float)
SCALE(f16_f16, gpu::half, gpu::half)
SCALE(f16_bf16, gpu::half, gpu::bfloat16)
SCALE(bf16_f32, gpu::bfloat16, float)
SCALE(bf16_f16, gpu::bfloat16, gpu::half)
SCALE(bf16_bf16, gpu::bfloat16, gpu::bfloat16)
MULTI_TENSOR_KERNEL(multi_tensor_scale_f64_f64, ScaleUpdate, double, double, double)
