// Norms whose output is FP8: what their kernels are given beside NormForward, and how a row's part leaves them.
#pragma once
#include "fp8_tile.h"
#include "norm_arguments.h"

namespace gpu {
// `output` of NormForward is [rows][hidden] codes of y * scale.
struct Fp8Norm {
  const float* scale;
  float* amax;  // becomes max(amax, max |y|); or null
  i32 format;
  i32 zero_centered_gamma;  // 1: rows are multiplied by 1 + weight
};

// The output as it is: numbers.
struct NormNumbers { static constexpr bool as_codes = false; };
// Formats that a `held` kernel is launched for: OCP's, for which newer cards have instructions.
constexpr bool is_held_format(i32 format) { return format < fp8_e4m3fnuz; }

#if !defined(GPU_HOST)
template <bool ocp> struct NormCodes {
  static constexpr bool as_codes = true;
  u8* output;
  Fp8 form;
  float scale, more;
  float largest;

  GPU_FN NormCodes(const NormForward& a, const Fp8Norm& fp8)
      : output(a.output), form(fp8.format), scale(*fp8.scale), more(fp8.zero_centered_gamma && a.weight ? 1.0f : 0.0f),
        largest(0.0f) {}

  template <int width> GPU_FN void centre(float (&weight)[width]) const {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) weight[i] += more;
  }
  template <int width> GPU_FN void store(i64 at, const float (&y)[width]) {
    float scaled[width];
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      largest = larger_magnitude(largest, y[i]);
      scaled[i] = y[i] * scale;
    }
    Fp8Tile<width> codes;
    codes.template encode<ocp>(form, 0, scaled);
    codes.store_row(0, output + at);
  }
};
#endif
}  // namespace gpu
