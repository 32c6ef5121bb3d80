#pragma once
#include "apex.h"
#include "device/fp8_quantize.h"

/* A cast to FP8; csrc/device/fp8_quantize.h says of what. partials, made_scale and counters, which the workspace
 * holds, wide_columns and column_blocks are filled in here. Without rows or columns no scale is made. */
extern "C" APEX_EXPORT int32_t apex_fp8_quantize(const apex_place* place, const gpu::Fp8Quantize* arguments,
                                                 const apex_workspace* workspace);

namespace apex {
void fp8_quantize_cpu(const gpu::Fp8Quantize& a);
}  // namespace apex
