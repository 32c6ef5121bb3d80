// The norm of all tensors of a list together and, if wanted, of each: L2, or the largest magnitude.
#pragma once
#include "multi_tensor_reduce.h"

namespace gpu {
struct NormArguments {
  double scale;            // elements are multiplied by it (and by inv_scale) before they are measured
  const float* inv_scale;  // nullable
  i32* noop_flag;          // nullable; a norm that is not finite raises it
  i32 check_noop;          // 1: a flag that is up on entry ends the launch
  i32 first, last;         // of several launches that measure one set of tensors together
  float* total;            // the norm of all; between launches: what `finish` must combine with
  float* per_tensor;       // [tensors] or null
  // per_tensor[t] = blended with what it holds, as NovoGrad's second moment: 1, 0 for a plain norm.
  double blend_new, blend_old;
  // The factor that brings the norm down to max_norm: min(1, max_norm / (norm + 1e-6)), as torch clips.
  double max_norm;
  float* clip_coefficient;  // nullable
};

template <class Math> GPU_FN void write_clip_coefficient(const NormArguments& a, Math norm) {
  if (!a.clip_coefficient) return;
  const Math coefficient = (Math)a.max_norm / (norm + (Math)1e-6);
  *a.clip_coefficient = (float)(coefficient > Math(1) ? Math(1) : coefficient);  // a nan norm stays nan
}

template <class Math> struct NormBase : ElementwiseOperation {
  using Arguments = NormArguments;
  static constexpr int lists = 1, unroll = 16 / sizeof(Math), reductions = 1;
  static constexpr u32 read = 0b1, written = 0b0;
  Math scale;

  GPU_FN bool begin(const Arguments& a) {
    if (a.check_noop && a.noop_flag && *a.noop_flag) return false;
    scale = (Math)a.scale * (a.inv_scale ? (Math)*a.inv_scale : Math(1));
    return true;
  }
};

template <class Math> struct L2Norm : NormBase<Math> {
  using typename NormBase<Math>::Arguments;
  using Reduction = Sum;

  GPU_FN void update(const Math& x, Math (&add)[1]) {
    const Math y = x * this->scale;
    add[0] = y * y;
  }
  GPU_FN void finish_tensor(const Arguments& a, u32 t, const Math (&totals)[1]) {
    if (!a.per_tensor) return;
    Math square = totals[0];
    if (a.blend_old != 0.0) {
      const Math old = (Math)a.per_tensor[t];
      square = (Math)a.blend_new * square + (Math)a.blend_old * old * old;
    }
    a.per_tensor[t] = (float)sqrt(square);
  }
  GPU_FN void finish(const Arguments& a, const Math (&totals)[1]) {
    // Between launches `total` holds the sum of squares.
    const Math square = totals[0] + (a.first ? Math(0) : (Math)*a.total);
    *a.total = (float)(a.last ? sqrt(square) : square);
    if (a.last) write_clip_coefficient(a, sqrt(square));
    if (a.noop_flag && !is_finite(square)) raise_flag(a.noop_flag);
  }
};

template <class Math> struct MaximumNorm : NormBase<Math> {
  using typename NormBase<Math>::Arguments;
  using Reduction = Maximum;

  GPU_FN void update(const Math& x, Math (&add)[1]) {
    const Math y = x * this->scale;
    add[0] = y < Math(0) ? -y : y;
  }
  GPU_FN void finish_tensor(const Arguments& a, u32 t, const Math (&totals)[1]) {
    if (!a.per_tensor) return;
    const Math old = a.blend_old != 0.0 ? (Math)a.blend_old * (Math)a.per_tensor[t] : Math(0);
    a.per_tensor[t] = (float)(a.blend_old != 0.0 ? (Math)a.blend_new * totals[0] + old : totals[0]);
  }
  GPU_FN void finish(const Arguments& a, const Math (&totals)[1]) {
    const Math largest = a.first ? totals[0] : Maximum::combine((Math)*a.total, totals[0]);
    *a.total = (float)largest;
    if (a.last) write_clip_coefficient(a, largest);
    if (a.noop_flag && !is_finite(largest)) raise_flag(a.noop_flag);
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, element)
#define MULTI_TENSOR_L2NORM(V)          \
  V(f32, L2Norm, float, float)          \
  V(f16, L2Norm, float, gpu::half)      \
  V(bf16, L2Norm, float, gpu::bfloat16) \
  V(f64, L2Norm, double, double)
#define MULTI_TENSOR_MAXIMUM_NORM(V)         \
  V(f32, MaximumNorm, float, float)          \
  V(f16, MaximumNorm, float, gpu::half)      \
  V(bf16, MaximumNorm, float, gpu::bfloat16) \
  V(f64, MaximumNorm, double, double)
