#include "fp8_rms_norm.h"

#include "fp8_checks.h"
#include "norm.h"

APEX_FP8_NORM_OP(fp8_rms_norm, false,
                 {APEX_NORM_KERNEL(fp8_rms_norm, forward_held_, bf16),
                  APEX_NORM_KERNEL(fp8_rms_norm, forward_held_, f16)})
