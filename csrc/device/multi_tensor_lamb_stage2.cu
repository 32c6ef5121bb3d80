#include "multi_tensor_lamb_stage2.h"

#define KERNEL(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_lamb_stage2_##name, __VA_ARGS__)
MULTI_TENSOR_LAMB_STAGE2(KERNEL)
