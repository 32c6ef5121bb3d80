#include "channel_apply.h"

CHANNEL_TYPES(CHANNEL_APPLY_KERNELS, relu_bw, ReluGradientChannel)
