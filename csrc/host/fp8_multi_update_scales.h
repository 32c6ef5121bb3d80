#pragma once
#include "apex.h"
#include "device/fp8_multi_update_scales.h"

/* One launch: at most 160 histories (count). first_block is filled in here. */
extern "C" APEX_EXPORT int32_t apex_fp8_multi_update_scales(const apex_place* place,
                                                            const gpu::Fp8MultiUpdateScales* arguments);
