#include "channel_reduce.h"

CHANNEL_TYPES(CHANNEL_REDUCE_KERNELS, welford_mean_var, welford)
