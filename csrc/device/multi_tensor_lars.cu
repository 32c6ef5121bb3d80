#include "multi_tensor_lars.h"

#define KERNEL(name, ...) MULTI_TENSOR_REDUCE_KERNEL(multi_tensor_lars_norms_##name, __VA_ARGS__)
MULTI_TENSOR_LARS_NORMS(KERNEL)
#undef KERNEL
#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_lars_##name, __VA_ARGS__)
MULTI_TENSOR_LARS(KERNEL)
MULTI_TENSOR_UNSCALE(KERNEL, LarsUnscale)
