#pragma once
#include "device/update_scale_hysteresis.h"
#include "host/apex.h"

extern "C" APEX_EXPORT int32_t apex_update_scale_hysteresis(const apex_place* place,
                                                            const gpu::ScaleHysteresis* arguments);
