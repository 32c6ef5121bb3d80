#pragma once
#include "apex.h"
#include "device/fp8_multi_quantize.h"

/* One launch: at most 64 matrices (count). first_block is filled in here. */
extern "C" APEX_EXPORT int32_t apex_fp8_multi_quantize(const apex_place* place, const gpu::Fp8MultiQuantize* arguments);
