#include "multi_tensor_adagrad.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_adagrad_##name, __VA_ARGS__)
MULTI_TENSOR_ADAGRAD(KERNEL)
MULTI_TENSOR_UNSCALE(KERNEL, AdagradUnscale)
