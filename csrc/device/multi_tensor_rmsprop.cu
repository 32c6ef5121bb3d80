#include "multi_tensor_rmsprop.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_rmsprop_##name, __VA_ARGS__)
MULTI_TENSOR_RMSPROP(KERNEL)
MULTI_TENSOR_RMSPROP_CENTERED(KERNEL)
