// What 2:4 pruning keeps of groups of columns: csrc/device/kept_magnitudes.h says what is computed.
#pragma once
#include "apex.h"
#include "device/kept_magnitudes_arguments.h"

extern "C" APEX_EXPORT int32_t apex_kept_magnitudes(const apex_place* place, const gpu::KeptMagnitudes* arguments);

namespace apex {
void kept_magnitudes_cpu(const gpu::KeptMagnitudes& a);
}  // namespace apex
