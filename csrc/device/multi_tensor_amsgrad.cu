#include "multi_tensor_amsgrad.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_amsgrad_##name, __VA_ARGS__)
MULTI_TENSOR_AMSGRAD(KERNEL)
