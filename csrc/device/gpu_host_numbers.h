// What both host builds share. Number conversions in integer arithmetic, because g++ 12 has no _Float16.
// Written without branches, so that loops over them vectorise.
#pragma once

namespace gpu {
template <class To, class From> GPU_FN To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
  return __builtin_bit_cast(To, x);
}
// Any number of threads may raise one flag: they all write the same word.
GPU_FN void raise_flag(i32* flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }
GPU_FN float divide(float a, float b) { return a / b; }
GPU_FN double divide(double a, double b) { return a / b; }
GPU_FN float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
GPU_FN float sqrt(float x) { return __builtin_sqrtf(x); }
GPU_FN double sqrt(double x) { return __builtin_sqrt(x); }
#if defined(GPU_SIMT)
GPU_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
GPU_FN double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else  // libm's fma is a hundred times slower than two roundings; where the target has one, g++ contracts this in
       // *_cpu.cpp
GPU_FN float fma(float a, float b, float c) { return a * b + c; }
GPU_FN double fma(double a, double b, double c) { return a * b + c; }
#endif

GPU_FN float to_float(half x) {
  const u32 sign = (u32)(x.bits & 0x8000) << 16, magnitude = (u32)(x.bits & 0x7fff) << 13;
  // Subnormal halves: let the float adder normalise them by taking the implicit one away again.
  const u32 subnormal = bit_cast<u32>(bit_cast<float>(magnitude + 0x38800000u) - bit_cast<float>(0x38800000u));
  const u32 normal = magnitude + 0x38000000u, special = magnitude | 0x7f800000u;
  const u32 finite = magnitude < 0x00800000u ? subnormal : normal;
  return bit_cast<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
}
GPU_FN void from_float(half& to, float x) {
  const u32 u = bit_cast<u32>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const u32 t = magnitude - 0x38000000u;
  const u32 normal = (t + 0xfffu + ((t >> 13) & 1)) >> 13;
  const u32 subnormal = bit_cast<u32>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;  // the adder rounds
  const u32 finite = magnitude < 0x38800000u ? subnormal : normal;
  const u32 large = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
  to.bits = (u16)(sign | (magnitude >= 0x47800000u ? large : finite));
}
GPU_FN void from_float(bfloat16& to, float x) {
  const u32 u = bit_cast<u32>(x), rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  to.bits = (u16)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}
}  // namespace gpu
