#include "rms_norm.h"

#include "norm.h"

APEX_NORM_OP(rms_norm, false)
