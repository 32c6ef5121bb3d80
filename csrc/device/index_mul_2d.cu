#include "index_mul_2d.h"

#define INDEX_MUL_KERNEL(name, ...)                                                                                 \
  extern "C" GPU_KERNEL(gpu::index_mul_2d_threads) void name(gpu::IndexMul2d arguments) { __VA_ARGS__(arguments); } \
  GPU_REGISTER(name)

#define KERNELS(name, type)                                                         \
  INDEX_MUL_KERNEL(index_mul_2d_gather_##name, gpu::index_mul_2d_gather<gpu::type>) \
  INDEX_MUL_KERNEL(index_mul_2d_scatter_##name, gpu::index_mul_2d_scatter<gpu::type>)
KERNELS(f32, type_f32)
KERNELS(f16, type_f16)
KERNELS(bf16, type_bf16)
KERNELS(f64, type_f64)
