#pragma once
#include "apex.h"
#include "device/fp8_quantize_blocks.h"

/* vectors, wide_columns and column_blocks are filled in here. */
extern "C" APEX_EXPORT int32_t apex_fp8_quantize_blocks(const apex_place* place,
                                                        const gpu::Fp8QuantizeBlocks* arguments);

namespace apex {
void fp8_quantize_blocks_cpu(const gpu::Fp8QuantizeBlocks& a);
}  // namespace apex
