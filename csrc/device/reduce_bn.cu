#include "channel_reduce.h"

CHANNEL_TYPES(CHANNEL_REDUCE_KERNELS, reduce_bn, gradients)
