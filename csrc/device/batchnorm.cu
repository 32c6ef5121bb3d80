#include "channel_apply.h"

CHANNEL_TYPES(CHANNEL_APPLY_KERNELS, batchnorm_forward, NormalizeChannel)
CHANNEL_TYPES(CHANNEL_APPLY_KERNELS, batchnorm_backward, GradientChannel)
