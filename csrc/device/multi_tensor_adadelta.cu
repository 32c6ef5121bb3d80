#include "multi_tensor_adadelta.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_adadelta_##name, __VA_ARGS__)
MULTI_TENSOR_ADADELTA(KERNEL)
