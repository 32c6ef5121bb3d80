#pragma once
#include "apex.h"
#include "device/fp8_transpose.h"

/* partials, which the workspace holds, wide_columns and column_blocks are filled in here. */
extern "C" APEX_EXPORT int32_t apex_fp8_transpose(const apex_place* place, const gpu::Fp8Transpose* arguments,
                                                  const apex_workspace* workspace);

namespace apex {
void fp8_transpose_cpu(const gpu::Fp8Transpose& a);
}  // namespace apex
