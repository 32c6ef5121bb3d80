#pragma once
#include "apex.h"
#include "device/fp8_quantize.h"

/* A cast to FP8. `partials`, where grad_bias is wanted, holds apex_fp8_quantize_parts(rows) floats for each column of
 * what is cast. What is cast and who fills in wide_columns and column_blocks: csrc/device/fp8_quantize.h, this library.
 */
extern "C" APEX_EXPORT int64_t apex_fp8_quantize_parts(int64_t rows);
extern "C" APEX_EXPORT int32_t apex_fp8_quantize(const apex_place* place, const gpu::Fp8Quantize* arguments);

namespace apex {
void fp8_quantize_cpu(const gpu::Fp8Quantize& a);
}  // namespace apex
