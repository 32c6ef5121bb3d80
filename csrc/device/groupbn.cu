#include "channel_apply.h"

CHANNEL_TYPES(CHANNEL_APPLY_KERNELS, groupbn_forward, MaskedNormalizeChannel)
CHANNEL_TYPES(CHANNEL_APPLY_KERNELS, groupbn_backward, MaskedGradientChannel)
