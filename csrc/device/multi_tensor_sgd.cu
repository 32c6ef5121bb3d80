#include "multi_tensor_sgd.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_sgd_##name, __VA_ARGS__)
MULTI_TENSOR_SGD(KERNEL)
MULTI_TENSOR_UNSCALE(KERNEL, SgdUnscale)
