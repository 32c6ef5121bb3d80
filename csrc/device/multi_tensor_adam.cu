#include "multi_tensor_adam.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_adam_##name, __VA_ARGS__)
MULTI_TENSOR_ADAM(KERNEL)
MULTI_TENSOR_UNSCALE(KERNEL, AdamUnscale)
