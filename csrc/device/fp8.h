// The FP8 formats: codes of numbers and numbers of codes, by integer arithmetic that is the same everywhere.
//
// A cast rounds to nearest even and saturates: what is too large becomes the largest value, and so does an infinity in
// OCP's formats; in FNUZ's (one NaN, no infinity, no -0) it becomes NaN. NaN stays NaN.
#pragma once
#include "vectors.h"

namespace gpu {
// A format, in arguments of kernels and of the C interface.
enum : i32 { fp8_e4m3fn, fp8_e5m2, fp8_e4m3fnuz, fp8_e5m2fnuz };

struct Fp8 {
  i32 format;
  u32 dropped;   // bits of a float's mantissa that a code has not
  u32 rebias;    // what a float's exponent and mantissa have more than a code's
  u32 smallest;  // a float's bits of the smallest normal value
  u32 largest, nan;
  u32 lost;  // a float's bits from which on it becomes NaN
  bool fnuz;

  GPU_FN explicit Fp8(i32 format) : format(format) {
    const bool five = format == fp8_e5m2 || format == fp8_e5m2fnuz;
    fnuz = format >= fp8_e4m3fnuz;
    const u32 bias = (five ? 15u : 7u) + (fnuz ? 1u : 0u);
    dropped = five ? 21 : 20;
    rebias = (127 - bias) << (23 - dropped);
    smallest = (128 - bias) << 23;
    largest = fnuz ? 0x7f : five ? 0x7b : 0x7e;
    nan = fnuz ? 0x80 : 0x7f;
    lost = fnuz ? 0x7f800000u : 0x7f800001u;
  }

  GPU_FN u32 encode(float x) const {
    const u32 bits = bit_cast<u32>(x), magnitude = bits & 0x7fffffffu;
    const u32 normal = ((magnitude + ((1u << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)) >> dropped) - rebias;
    // Below the smallest normal value: beside a number whose last bit is worth the smallest code, the adder rounds.
    const float beside = bit_cast<float>(smallest + (dropped << 23));
    const u32 subnormal = bit_cast<u32>(bit_cast<float>(magnitude) + beside) - bit_cast<u32>(beside);
    u32 code = magnitude < smallest ? subnormal : normal;
    code = code < largest ? code : largest;
    const u32 sign = fnuz && code == 0 ? 0u : (bits >> 24) & 0x80u;
    return magnitude >= lost ? nan : code | sign;
  }
  GPU_FN float decode(u32 code) const {
    const u32 low = code & 0x7fu, bits = (low << dropped) + (rebias << dropped);
    const float subnormal = bit_cast<float>(bits + 0x00800000u) - bit_cast<float>(smallest);
    u32 magnitude = low < 1u << (23 - dropped) ? bit_cast<u32>(subnormal) : bits;
    if (format == fp8_e4m3fn) magnitude = low == 0x7fu ? 0x7fc00000u : magnitude;
    if (format == fp8_e5m2) magnitude = low > 0x7cu ? 0x7fc00000u : low == 0x7cu ? 0x7f800000u : magnitude;
    if (fnuz) magnitude = code == 0x80u ? 0x7fc00000u : magnitude;
    return bit_cast<float>(magnitude | (code & 0x80u) << 24);
  }

  GPU_FN float maximum() const { return decode(largest); }

  // Four codes in a word, the first one lowest. ocp: the format is known to be one of OCP's.
  template <bool ocp = false> GPU_FN u32 encode_four(const float (&x)[4]) const {
#if defined(GPU_CUDA) && __CUDA_ARCH__ >= 890
    if (ocp || !fnuz) {
      u16 low, high;
      if (format == fp8_e4m3fn) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
      } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
      }
      return (u32)high << 16 | low;
    }
#endif
    return encode(x[0]) | encode(x[1]) << 8 | encode(x[2]) << 16 | encode(x[3]) << 24;
  }
};
}  // namespace gpu
