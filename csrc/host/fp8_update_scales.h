#pragma once
#include "apex.h"
#include "device/fp8_update_scales.h"

extern "C" APEX_EXPORT int32_t apex_fp8_update_scales(const apex_place* place, const gpu::Fp8UpdateScales* arguments);

namespace apex {
void fp8_update_scales_cpu(const gpu::Fp8UpdateScales& a);
}  // namespace apex
