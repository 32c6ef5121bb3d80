#pragma once
#include "apex.h"
#include "device/norm_codes.h"

/* The output of `arguments` is FP8, output_type the input's type. warp_rows, stages, constant_bytes are filled in here.
 */
extern "C" APEX_EXPORT int32_t apex_fp8_rms_norm(const apex_place* place, const gpu::NormForward* arguments,
                                                 const gpu::Fp8Norm* fp8);
