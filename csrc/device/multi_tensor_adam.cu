#include "multi_tensor_adam.h"

// multi_tensor_adam_<gradient>_<parameter>: moments are float, or double with double parameters.
#define ADAM(name, G, P) MULTI_TENSOR_KERNEL(multi_tensor_adam_##name, AdamUpdate, float, G, P, float, float)
ADAM(f32_f32, float, float)
ADAM(f16_f32, gpu::half, float)
ADAM(bf16_f32, gpu::bfloat16, float)
ADAM(f16_f16, gpu::half, gpu::half)
ADAM(f32_f16, float, gpu::half)
ADAM(bf16_bf16, gpu::bfloat16, gpu::bfloat16)
ADAM(f32_bf16, float, gpu::bfloat16)
MULTI_TENSOR_KERNEL(multi_tensor_adam_f64_f64, AdamUpdate, double, double, double, double, double)

// multi_tensor_adam_master_<gradient>_<model>: the parameter is a float master of a lower-precision model.
#define ADAM_MASTER(name, G, M) \
  MULTI_TENSOR_KERNEL(multi_tensor_adam_master_##name, AdamMasterUpdate, float, G, float, float, float, M)
ADAM_MASTER(f16_f16, gpu::half, gpu::half)
ADAM_MASTER(bf16_bf16, gpu::bfloat16, gpu::bfloat16)
ADAM_MASTER(f32_f16, float, gpu::half)
ADAM_MASTER(f32_bf16, float, gpu::bfloat16)
ADAM_MASTER(f32_f32, float, float)
