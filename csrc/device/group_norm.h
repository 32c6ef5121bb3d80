// Group norm, with SiLU (swish) after it or without: what its kernels and its CPU variant share.
//
//   y = f((x - mean) * rstd * weight + bias), mean and rstd of a group of channels of one image, f SiLU or nothing
//   backward, with g = dy * f': of the bias and weight the sums of g and g * x^, x^ the normalised input, over all but
//   the channel; of the input rstd * (g * weight - (the group's sum of g * weight + x^ * that of g * weight * x^) / n)
//
// An image's groups that fit in a block's shared memory are read once (group_norm_tile.h). Else two launches follow
// each other: statistics, or sums, of parts of an image, then the pass that writes (group_norm_last.h,
// group_norm_first.h); it goes through memory backwards, since what was read last is still in the cache. The order of
// every sum is fixed.
#pragma once
#include "exponential.h"
#include "group_norm_arguments.h"
#include "vectors.h"
#include "welford.h"

namespace gpu {
// f and f'. exact: exp as exact as Math; else it loses what halves do not see.
template <class Math, bool exact> struct Silu {
  GPU_FN static Math sigmoid(Math z) {
    if constexpr (exact) return Math(1) / (Math(1) + exp_series(-z));
    else return reciprocal(Math(1) + exp2(z * Math(-1.4426950408889634)));
  }
  GPU_FN static Math value(Math z) {
    if constexpr (exact) return z / (Math(1) + exp_series(-z));  // a rounding less
    else return z * sigmoid(z);
  }
  GPU_FN static Math slope(Math z) {
    const Math s = sigmoid(z);
    return s * fma(z, Math(1) - s, Math(1));
  }
};

template <i32 type> struct GroupNormMath { using Type = float; };
template <> struct GroupNormMath<type_f64> { using Type = double; };

// f of z, in place; and g of the formula above, in dy's place.
template <class Math, bool exact, int width> GPU_FN void activate(Math (&z)[width], bool silu) {
  if (silu)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) z[i] = Silu<Math, exact>::value(z[i]);
}
template <class Math, bool exact, int width> GPU_FN void gradient_of_z(Math (&dy)[width], const Math (&z)[width],
                                                                       bool silu) {
  if (silu)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) dy[i] *= Silu<Math, exact>::slope(z[i]);
}

// Elements as memory has them, converted when they are used: they wait in few registers.
template <i32 type, int width> struct Loaded {
  Words words;
  GPU_FN void load(const u8* tensor, i32, i64 index) {
    words = load_words<width>(tensor + index * bytes_of(type), type);
  }
  GPU_FN void get(float (&x)[width]) const { unpack(x, words, type); }
};
template <i32 type> struct Loaded<type, 1> {
  using Math = typename GroupNormMath<type>::Type;
  Math value[1];
  GPU_FN void load(const u8* tensor, i32 any, i64 index) { load_values(value, tensor, known_type<type>(any), index); }
  GPU_FN void get(Math (&x)[1]) const { x[0] = value[0]; }
};
}  // namespace gpu
