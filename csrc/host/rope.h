#pragma once
#include "apex.h"
#include "device/rope.h"

/* Turns the heads of `arguments->input`; what the launch needs (lane_threads and on) is filled in here. */
extern "C" APEX_EXPORT int32_t apex_rope(const apex_place* place, const gpu::Rope* arguments);

namespace apex {
void rope_cpu(const gpu::Rope& a);
}  // namespace apex
