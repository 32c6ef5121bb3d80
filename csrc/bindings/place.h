// Where a torch tensor's work runs: platform, device and torch's current stream of that device.
#pragma once
#include <c10/core/Device.h>

#include "api.h"
#include "host/apex.h"

namespace apex {
// torch spells both vendors "cuda"; the loader says which one this process has (1: HIP).
extern "C" APEX_TORCH_API void apex_torch_use_hip(int hip);

// A device that no variant of ours serves (mps, xpu, ...) has platform -1.
APEX_TORCH_API apex_place place_of(c10::Device device);
}  // namespace apex
