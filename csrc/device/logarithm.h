// The natural logarithm by arithmetic alone: it needs no vendor's library of functions. For a few values, not a stream.
#pragma once
#include "gpu.h"

namespace gpu {
// Of 0, of normal numbers, of infinity and nan.
GPU_FN float log(float x) {
  if (!(x > 0.0f && is_finite(x))) return x == 0.0f ? -bit_cast<float>(0x7f800000u) : x;
  const i32 exponent = (i32)(bit_cast<u32>(x) - 0x3f3504f3u) >> 23;  // x / 2^exponent is in [sqrt(1/2), sqrt(2))
  const float m = bit_cast<float>(bit_cast<u32>(x) - ((u32)exponent << 23));
  const float z = (m - 1.0f) / (m + 1.0f), square = z * z;
  float series = 1.0f / 9.0f;
  series = fma(series, square, 1.0f / 7.0f);
  series = fma(series, square, 1.0f / 5.0f);
  series = fma(series, square, 1.0f / 3.0f);
  const float of_m = fma(2.0f * z * square, series, 2.0f * z), k = (float)exponent;
  return fma(k, 0.693145752f, fma(k, 1.42860677e-6f, of_m));  // the first constant times k is exact
}
GPU_FN double log(double x) {
  if (!(x > 0.0 && is_finite(x))) return x == 0.0 ? -bit_cast<double>(0x7ff0000000000000ull) : x;
  const i32 exponent = (i32)((bit_cast<u64>(x) - 0x3fe6a09e667f3bcdull) >> 32) >> 20;
  const double m = bit_cast<double>(bit_cast<u64>(x) - ((u64)(i64)exponent << 52));
  const double z = (m - 1.0) / (m + 1.0), square = z * z;
  double series = 1.0 / 25.0;
  GPU_UNROLL_FOR (int k = 23; k > 1; k -= 2) series = fma(series, square, 1.0 / k);
  const double of_m = fma(2.0 * z * square, series, 2.0 * z), k = (double)exponent;
  return fma(k, 0.693147180369123816490, fma(k, 1.90821492927058770002e-10, of_m));
}

// log(1 + e) for e in [0, 1], by the series of atanh: small e keep their digits.
GPU_FN float log_of_one_plus(float e) {
  const float z = e / (2.0f + e), square = z * z;
  float series = 1.0f / 15.0f;
  GPU_UNROLL_FOR (int k = 13; k > 1; k -= 2) series = fma(series, square, 1.0f / (float)k);
  return fma(2.0f * z * square, series, 2.0f * z);
}
GPU_FN double log_of_one_plus(double e) {
  const double z = e / (2.0 + e), square = z * z;
  double series = 1.0 / 35.0;
  GPU_UNROLL_FOR (int k = 33; k > 1; k -= 2) series = fma(series, square, 1.0 / (double)k);
  return fma(2.0 * z * square, series, 2.0 * z);
}
}  // namespace gpu
