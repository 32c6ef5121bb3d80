#include "channel_reduce.h"

CHANNEL_TYPES(CHANNEL_REDUCE_KERNELS, reduce_bn, gradients)
CHANNEL_TYPES(MASKED_CHANNEL_REDUCE_KERNELS, reduce_bn, gradients)
