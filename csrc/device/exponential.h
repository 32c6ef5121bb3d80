// Powers of two and maxima: in float as fast as the device has them, in double by arithmetic alone. No vendor's library
// of functions is needed, and the host's loops over them vectorise.
#pragma once
#include "gpu.h"

namespace gpu {
// The larger one; if one is a nan, the other or the nan.
#if defined(GPU_CUDA)
GPU_FN float max_number(float a, float b) { return ::fmaxf(a, b); }
#elif defined(GPU_HIP)
GPU_FN float max_number(float a, float b) { return __builtin_fmaxf(a, b); }
#else
GPU_FN float max_number(float a, float b) { return b > a ? b : a; }
#endif
GPU_FN double max_number(double a, double b) { return b > a ? b : a; }

// Within two units in the last place; below 2^-126 it is 0.
#if defined(GPU_CUDA)
GPU_FN float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#elif defined(GPU_HIP)
GPU_FN float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
#else
GPU_FN float exp2(float x) {
  const float low = x < -126.0f ? -126.0f : x, clamped = low > 128.0f ? 128.0f : low;  // a nan stays
  const float shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the nearest whole number
  const float f = clamped - (shifted - 12582912.0f);
  float p = 1.534580806e-4f;  // minimax, relative error 2e-9
  p = fma(p, f, 1.339993090e-3f);
  p = fma(p, f, 9.618489072e-3f);
  p = fma(p, f, 5.550328642e-2f);
  p = fma(p, f, 2.402264625e-1f);
  p = fma(p, f, 6.931471825e-1f);
  p = fma(p, f, 1.0f);
  const float power = bit_cast<float>((bit_cast<u32>(shifted) - (0x4b400000u - 127u)) << 23);
  return x < -126.0f ? 0.0f : p * power;
}
#endif
GPU_FN double exp2(double x) {
  const double low = x < -1022.0 ? -1022.0 : x, clamped = low > 1024.0 ? 1024.0 : low;
  const double shifted = clamped + 6755399441055744.0;  // 1.5 * 2^52
  const double f = (clamped - (shifted - 6755399441055744.0)) * 0.6931471805599453;
  double p = 1.0;  // e^f by its series, |f| < 0.35
  GPU_UNROLL for (int k = 14; k; --k) p = fma(p, f * (1.0 / k), 1.0);
  const double power = bit_cast<double>((bit_cast<u64>(shifted) - (0x4338000000000000ull - 1023ull)) << 52);
  return x < -1022.0 ? 0.0 : p * power;
}
}  // namespace gpu
