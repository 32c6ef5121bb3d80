#include "multi_tensor_lamb_stage1.h"

#define KERNEL(name, ...) MULTI_TENSOR_REDUCE_KERNEL(multi_tensor_lamb_stage1_##name, __VA_ARGS__)
MULTI_TENSOR_LAMB_STAGE1(KERNEL)
