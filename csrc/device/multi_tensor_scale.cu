#include "multi_tensor_scale.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_scale_##name, __VA_ARGS__)
MULTI_TENSOR_SCALE(KERNEL)
