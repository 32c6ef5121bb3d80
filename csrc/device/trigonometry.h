// Sine and cosine of one angle, the same operations on every platform: the vendors' own differ in their last bits.
#pragma once
#include "gpu.h"

namespace gpu {
#if defined(GPU_HOST)
GPU_FN double exact_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
GPU_FN double exact_fma(double a, double b, double c) { return fma(a, b, c); }
#endif

// Angles past it, in radians, are nan: neighbouring float32 angles are further apart there than 10 million turns.
constexpr double largest_angle = 1125899906842624.0;  // 2^50

// Within a unit in the last place of Math (float or double), absolute. The angle is reduced in double to at most
// an eighth of a turn; there the Taylor series, nested, needs few terms.
template <class Math> GPU_FN void sine_cosine(double angle, Math& sine, Math& cosine) {
  angle = angle < largest_angle && angle > -largest_angle ? angle : (double)bit_cast<float>(0x7fc00000u);
  constexpr double two_by_pi = 0.63661977236758134308, half_pi = 1.57079632679489655800,
                   half_pi_rest = 6.12323399573676603587e-17;
  constexpr double round = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves a whole number in the low bits
  const double shifted = angle * two_by_pi + round, quarters = shifted - round;
  const u32 quarter = (u32)bit_cast<u64>(shifted);
  const double reduced = exact_fma(-quarters, half_pi_rest, exact_fma(-quarters, half_pi, angle));
  const Math x = (Math)reduced, rest = (Math)(reduced - (double)x), z = x * x;
  constexpr int terms = sizeof(Math) == 8 ? 9 : 5;
  Math s = Math(1), c = Math(1);
  GPU_UNROLL_FOR (int n = terms; n >= 2; --n) {
    c = fma(-c, z * Math(1.0 / ((2 * n - 1) * (2 * n))), Math(1));
    s = fma(-s, z * Math(1.0 / ((2 * n) * (2 * n + 1))), Math(1));
  }
  // The last terms in sums of something small and x, or 1: hardly more than one rounding.
  s = x + fma(-s * (z * Math(1.0 / 6)), x, rest);
  c = Math(1) - fma(c, z * Math(0.5), rest * x);
  const bool odd = quarter & 1;
  sine = odd ? c : s;
  cosine = odd ? s : c;
  if (quarter & 2) sine = -sine;
  if ((quarter + 1) & 2) cosine = -cosine;
}
}  // namespace gpu
