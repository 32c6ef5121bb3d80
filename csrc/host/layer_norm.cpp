#include "layer_norm.h"

#include "norm.h"

APEX_NORM_OP(layer_norm, true)
