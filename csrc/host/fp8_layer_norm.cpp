#include "fp8_layer_norm.h"

#include "fp8_checks.h"
#include "norm.h"

APEX_FP8_NORM_OP(fp8_layer_norm, true, {})
