#include "multi_tensor_novograd.h"

#define KERNELS(name, ...)                                                                 \
  MULTI_TENSOR_REDUCE_KERNEL(multi_tensor_novograd_norm_##name, NovogradNorm, __VA_ARGS__) \
  MULTI_TENSOR_REDUCE_KERNEL(multi_tensor_novograd_maximum_##name, NovogradMaximum, __VA_ARGS__)
MULTI_TENSOR_NOVOGRAD_NORMS(KERNELS)
#undef KERNELS
#define KERNELS(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_novograd_##name, NovogradUpdate, __VA_ARGS__)
MULTI_TENSOR_NOVOGRAD(KERNELS)
#undef KERNELS
#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_novograd_##name, __VA_ARGS__)
MULTI_TENSOR_UNSCALE(KERNEL, NovogradUnscale)
