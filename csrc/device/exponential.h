// Powers of two, reciprocals and maxima: in float as fast as the device has them, in double by arithmetic alone. No
// vendor's library of functions is needed, and the host's loops over them vectorise.
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
// The larger one; a nan stays.
template <class Math> GPU_FN Math max_or_nan(Math x, Math least) { return x < least ? least : x; }
#if defined(GPU_CUDA) && __CUDA_ARCH__ >= 800
template <> GPU_FN float max_or_nan<float>(float x, float least) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(least));
  return y;
}
#endif

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
  GPU_UNROLL_FOR (int k = 14; k; --k) p = fma(p, f * (1.0 / k), 1.0);
  const double power = bit_cast<double>((bit_cast<u64>(shifted) - (0x4338000000000000ull - 1023ull)) << 52);
  return x < -1022.0 ? 0.0 : p * power;
}

// 1 / x of an x in [1, 2^126], within a unit in the last place or two.
#if defined(GPU_CUDA)
GPU_FN float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#elif defined(GPU_HIP)
GPU_FN float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
#else
GPU_FN float reciprocal(float x) { return 1.0f / x; }
#endif
GPU_FN double reciprocal(double x) { return 1.0 / x; }
// x / y of such a y, whose reciprocal `by` is: on the host a rounding less.
#if defined(GPU_CUDA) || defined(GPU_HIP)
template <class Math> GPU_FN Math fraction(Math x, Math, Math by) { return x * by; }
#else
template <class Math> GPU_FN Math fraction(Math x, Math y, Math) { return x / y; }
#endif

// e^x as 2^n * e^r, |r| <= ln(2) / 2, by the series of e^r: within a unit in the last place, which exp2(x / ln(2)) is
// not where x is large. Results too small for the type round to it or to 0, those too large to infinity; a nan stays.
template <class Math> struct ExpSeries;
template <> struct ExpSeries<float> {
  using Bits = i32;
  static constexpr float round = 12582912.0f, least = -170.0f, most = 170.0f;  // 1.5 * 2^23: adding it rounds
  static constexpr float ln2 = 0.693359375f, ln2_rest = -2.12194440e-4f;       // n * ln2 is exact
  static constexpr int terms = 7, mantissa = 23, bias = 127;
};
template <> struct ExpSeries<double> {
  using Bits = i64;
  static constexpr double round = 6755399441055744.0, least = -1400.0, most = 1400.0;
  static constexpr double ln2 = 6.93147180369123816490e-01, ln2_rest = 1.90821492927058770002e-10;
  static constexpr int terms = 13, mantissa = 52, bias = 1023;
};
template <class Math> GPU_FN Math exp_series(Math x) {
  using S = ExpSeries<Math>;
  using Bits = typename S::Bits;
  constexpr Math coefficients[14] = {// 1 / k!
                                     Math(1),
                                     Math(1),
                                     Math(1.0 / 2),
                                     Math(1.0 / 6),
                                     Math(1.0 / 24),
                                     Math(1.0 / 120),
                                     Math(1.0 / 720),
                                     Math(1.0 / 5040),
                                     Math(1.0 / 40320),
                                     Math(1.0 / 362880),
                                     Math(1.0 / 3628800),
                                     Math(1.0 / 39916800),
                                     Math(1.0 / 479001600),
                                     Math(1.0 / 6227020800.0)};
  x = x < S::least ? S::least : x;
  x = x > S::most ? S::most : x;
  const Math shifted = x * Math(1.4426950408889634) + S::round, whole = shifted - S::round;
  const Math r = (x - whole * S::ln2) - whole * S::ln2_rest;
  const Bits n = bit_cast<Bits>(shifted) - bit_cast<Bits>(S::round);
  Math y = coefficients[S::terms];
  GPU_UNROLL_FOR (int k = S::terms - 1; k >= 2; --k) y = fma(y, r, coefficients[k]);
  y = Math(1) + (r + r * r * y);  // the least rounding last
  // Two factors, as 2^n alone may be too small for the type. Of a nan n is any number, and the product a nan.
  const Bits first = n >> 1, second = n - first;
  return y * bit_cast<Math>((first + S::bias) << S::mantissa) * bit_cast<Math>((second + S::bias) << S::mantissa);
}

// The same of an x that is not above 0; results below 2^-126 may be 0.
#if defined(GPU_HOST)
GPU_FN float exp_of_negative(float x) {
  using S = ExpSeries<float>;
  const float shifted = x * 1.4426950408889634f + S::round, whole = shifted - S::round;
  const float r = (x - whole * S::ln2) - whole * S::ln2_rest;
  float p = 1.38145402e-3f;  // (e^r - 1 - r) / r^2, minimax: of e^r a relative error of 3e-9
  p = fma(p, r, 8.36874511e-3f);
  p = fma(p, r, 4.16683908e-2f);
  p = fma(p, r, 1.66665204e-1f);
  p = fma(p, r, 4.99999934e-1f);
  const float power = bit_cast<float>((bit_cast<u32>(shifted) - (0x4b400000u - 127u)) << 23);
  return x < -87.33655f ? 0.0f : fma(power, fma(r * r, p, r), power);
}
#else
GPU_FN float exp_of_negative(float x) { return exp_series(x); }
#endif
GPU_FN double exp_of_negative(double x) { return exp_series(x); }
}  // namespace gpu
