#pragma once
#include "apex.h"
#include "device/fp8_dequantize.h"

/* `vectors` is filled in here. */
extern "C" APEX_EXPORT int32_t apex_fp8_dequantize(const apex_place* place, const gpu::Fp8Dequantize* arguments);

namespace apex {
void fp8_dequantize_cpu(const gpu::Fp8Dequantize& a);
}  // namespace apex
