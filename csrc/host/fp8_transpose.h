#pragma once
#include "apex.h"
#include "device/fp8_transpose.h"

/* `partials`, where grad_bias is wanted, holds apex_fp8_quantize_parts(rows) floats for each column. wide_columns and
 * column_blocks are filled in here. */
extern "C" APEX_EXPORT int32_t apex_fp8_transpose(const apex_place* place, const gpu::Fp8Transpose* arguments);

namespace apex {
void fp8_transpose_cpu(const gpu::Fp8Transpose& a);
}  // namespace apex
