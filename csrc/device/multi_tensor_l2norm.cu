#include "multi_tensor_l2norm.h"

#define KERNEL(name, ...) MULTI_TENSOR_REDUCE_KERNEL(multi_tensor_l2norm_##name, __VA_ARGS__)
MULTI_TENSOR_L2NORM(KERNEL)
#undef KERNEL
#define KERNEL(name, ...) MULTI_TENSOR_REDUCE_KERNEL(multi_tensor_l2norm_maximum_##name, __VA_ARGS__)
MULTI_TENSOR_MAXIMUM_NORM(KERNEL)
