#include "multi_tensor_axpby.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_axpby_##name, __VA_ARGS__)
MULTI_TENSOR_AXPBY(KERNEL)
