// What forward and backward of the norms share about one value.
#pragma once
#include "vectors.h"

namespace gpu {
#if !defined(GPU_HOST)
// What is left of a row once normalised: (x - mean) * rstd, or the output without weight and bias.
template <bool centered, class Math> struct Normalized {
  Math mean, rstd, smallest;
  bool from_output;

  GPU_FN Math of_input(Math saved) const { return (centered ? saved - mean : saved) * rstd; }
  GPU_FN Math of_output(Math saved, Math weight, Math bias) const {
    const Math magnitude = maximum(weight < Math(0) ? -weight : weight, smallest);
    return divide(centered ? saved - bias : saved, weight < Math(0) ? -magnitude : magnitude);
  }
  GPU_FN Math operator()(Math saved, Math weight, Math bias) const {
    return from_output ? of_output(saved, weight, bias) : of_input(saved);
  }
};

template <class Math> GPU_FN Math load_statistic(const u8* p, i64 row) {
  return p ? reinterpret_cast<const Math*>(p)[row] : Math(0);
}
template <int width, class Math>
GPU_FN void load_weight(Math (&w)[width], const u8* p, i32 type, i64 index, Math otherwise) {
  if (p) load_values(w, p, type, index);
  else
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) w[i] = otherwise;
}
#endif
}  // namespace gpu
