// Mean and squared deviations, merged as Chan, Golub and LeVeque (1983) do: no cancellation, whatever the mean.
#pragma once
#include "gpu.h"

namespace gpu {
// What a reduction over a channel holds: numbers that merge. Nothing yet: all zeros.
template <class Math_> struct Moments {
  using Math = Math_;
  Math count, mean, m2;  // m2: squared deviations from the mean, added up

  static GPU_FN Moments of(Math count, Math first, Math second) { return {count, first, second}; }
  GPU_FN Math first() const { return mean; }
  GPU_FN Math second() const { return m2; }

  GPU_FN void merge(const Moments& other) {
    const Math total = count + other.count, apart = other.mean - mean;
    const Math share = count == Math(0) ? Math(1) : divide(other.count, total);  // nothing here yet: all of it, exactly
    mean = fma(apart, share, mean);
    m2 = fma(apart * apart, count * share, m2 + other.m2);
    count = total;
  }
};

// 1 / sqrt(m2 / count + eps), rounded once.
#if defined(GPU_CUDA) || defined(GPU_HIP)
// What is rounded off on the way is known, and made good by a step of Newton's.
template <class Math> GPU_FN Math inverse_deviation(Math m2, Math count, Math eps) {
  const Math share = m2 / count, v = share + eps, of_eps = v - share;
  const Math lost = fma(-share, count, m2) / count + ((share - (v - of_eps)) + (eps - of_eps));  // of v
  const Math r = Math(1) / sqrt(v), h = v * r;
  const Math apart = fma(-h, r, Math(1)) - fma(fma(v, r, -h), r, lost * r * r);
  const Math better = fma(Math(0.5) * r, apart, r);
  return better == better ? better : r;  // of zero, infinity and nan
}
#else  // fma may be two roundings here
template <class Math> GPU_FN Math inverse_deviation(Math m2, Math count, Math eps) {
  return (Math)(1.0 / sqrt((double)m2 / (double)count + (double)eps));
}
#endif

// What elements' differences are taken from, to be scaled: y = (x - origin) * scale + shift. A mean that is large
// beside the deviation: the differences are exact then, but a product with it would round. Zero else: the differences
// would.
template <class Math> GPU_FN Math origin_of(Math mean, Math inv_std) {
  const Math size = mean < Math(0) ? -mean : mean;
  return size * inv_std > Math(1) ? mean : Math(0);
}

template <class Math_> struct TwoSums {
  using Math = Math_;
  Math count, sums[2];

  static GPU_FN TwoSums of(Math count, Math first, Math second) { return {count, {first, second}}; }
  GPU_FN Math first() const { return sums[0]; }
  GPU_FN Math second() const { return sums[1]; }

  GPU_FN void merge(const TwoSums& other) {
    sums[0] += other.sums[0];
    sums[1] += other.sums[1];
  }
};

// The same for inputs as exact as the sums are: what merging rounds off is kept beside them.
template <class Math_> struct CarefulSums {
  using Math = Math_;
  Math count, sums[2], rests[2];

  static GPU_FN CarefulSums of(Math count, Math first, Math second) { return {count, {first, second}, {}}; }
  GPU_FN Math first() const { return whole(0); }
  GPU_FN Math second() const { return whole(1); }

  GPU_FN void merge(const CarefulSums& other) {
    GPU_UNROLL_FOR (int n = 0; n < 2; ++n) {
      const Math total = sums[n] + other.sums[n], added = total - sums[n];
      rests[n] += (sums[n] - (total - added)) + (other.sums[n] - added) + other.rests[n];
      sums[n] = total;
    }
  }

 private:
  GPU_FN Math whole(int n) const {
    return rests[n] == rests[n] ? sums[n] + rests[n] : sums[n];
  }  // infinity less infinity
};
}  // namespace gpu
