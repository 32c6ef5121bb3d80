// The portability layer of every device source. Includes no vendor header, no torch, no C++ library.
//
// One source compiles unchanged under nvcc, NVRTC, clang/hipcc and hipRTC; with GPU_SIMT for the executor
// of the tests; and by any other C++ compiler for the CPU variants, which share the arithmetic but not the threads.
// Each platform's header defines the same names; what they share is below.
#pragma once

namespace gpu {
using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

struct half { u16 bits; };
struct bfloat16 { u16 bits; };
}  // namespace gpu

#if defined(GPU_SIMT)
#include "gpu_simt.h"
#elif defined(__HIP__) || defined(__HIPCC_RTC__)
#include "gpu_hip.h"
#elif defined(__CUDACC__)
#include "gpu_cuda.h"
#else
#include "gpu_host.h"
#endif

namespace gpu {
constexpr int warp_size = GPU_WARP_SIZE;

// ---- numbers ---------------------------------------------------------------------------------------
GPU_FN float to_float(float x) { return x; }
GPU_FN float to_float(bfloat16 x) { return bit_cast<float>((u32)x.bits << 16); }
GPU_FN void from_float(float& to, float x) { to = x; }

// Arithmetic is done in float, or in double where the tensors hold double.
template <class Math, class T> GPU_FN Math load_as(T x) { return (Math)to_float(x); }
template <> GPU_FN double load_as<double, double>(double x) { return x; }
template <class T> GPU_FN void store_as(T& to, float x) { from_float(to, x); }
GPU_FN void store_as(double& to, double x) { to = x; }
GPU_FN void store_as(float& to, double x) { to = (float)x; }

GPU_FN bool is_finite(float x) { return (bit_cast<u32>(x) & 0x7f800000u) != 0x7f800000u; }
GPU_FN bool is_finite(double x) { return (bit_cast<u64>(x) & 0x7ff0000000000000ull) != 0x7ff0000000000000ull; }
template <class T> GPU_FN T maximum(T a, T b) { return a > b ? a : b; }

// base^exponent, squared up: exact enough in double for any step count, and needs no pow.
GPU_FN double integer_power(double base, u32 exponent) {
  double result = 1.0;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// ---- vectors: one memory access of N elements ---------------------------------------------------------
template <class T, int N> struct alignas(sizeof(T) * N) Vector { T v[N]; };
}  // namespace gpu
