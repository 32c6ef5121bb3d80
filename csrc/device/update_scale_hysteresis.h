// The loss scale of the next step: grown after a run of steps without overflow, lowered after an overflow, but
// only once `hysteresis` of them came without a good step between.
#pragma once
#include "gpu.h"

namespace gpu {
struct ScaleHysteresis {
  float* scale;
  i32* growth_tracker;      // good steps since the scale last changed
  i32* hysteresis_tracker;  // overflows that are still tolerated
  const float* found_inf;
  double growth_factor, backoff_factor;
  i32 growth_interval;
  i32 hysteresis;
};

GPU_FN void update_scale_hysteresis(const ScaleHysteresis& a) {
  const float found = *a.found_inf;
  if (found > 0.0f) {
    *a.hysteresis_tracker -= 1;
    if (*a.hysteresis_tracker > 0) {
      *a.growth_tracker = 0;
      return;
    }
  }
  if (found != 0.0f) {
    const float lowered = (float)(*a.scale * a.backoff_factor);
    if (lowered >= 1.17549435e-38f) *a.scale = lowered;  // 2^-126: what is less has no finite reciprocal
    *a.growth_tracker = 0;
  } else if (*a.growth_tracker + 1 == a.growth_interval) {
    const float grown = (float)(*a.scale * a.growth_factor);
    if (is_finite(grown)) *a.scale = grown;
    *a.growth_tracker = 0;
  } else {
    *a.growth_tracker += 1;
  }
  if (found <= 0.0f) *a.hysteresis_tracker = a.hysteresis;
}
}  // namespace gpu
