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
}  // namespace gpu
