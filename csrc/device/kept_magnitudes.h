// What 2:4 pruning keeps of groups of eight columns, however they are split into fours: the formula of the
// kernel and the CPU variant.
//
//   sums[group][four] = sum over the rows of the two largest magnitudes in the four columns
//
// The 70 fours of eight columns are in the order of their indices: 0123, 0124, ..., 4567.
#pragma once
#include "exponential.h"
#include "kept_magnitudes_arguments.h"

namespace gpu {
// Fours before the first one that begins with i, j, k, l.
GPU_FN constexpr int choose(int n, int k) { return k == 0 ? 1 : n < k ? 0 : choose(n - 1, k - 1) + choose(n - 1, k); }
GPU_FN constexpr int index_of_four(int i, int j, int k, int l) {
  return kept_fours - 1 - choose(7 - i, 4) - choose(7 - j, 3) - choose(7 - k, 2) - choose(7 - l, 1);
}

// Adds what is kept of each four of one row's magnitudes. Of three with the largest `one` and the two largest together
// `two`, a fourth makes max(two, one + it). By recursion, so that every index is known when it is compiled.
template <int i, int j, int k, int l, class T> GPU_FN void add_last(const T (&x)[8], const T& two, const T& one,
                                                                    T (&sums)[70]) {
  constexpr int four = index_of_four(i, j, k, l);
  sums[four] = sums[four] + max_number(two, one + x[l]);
  if constexpr (l < 7) add_last<i, j, k, l + 1>(x, two, one, sums);
}
template <int i, int j, int k, class T> GPU_FN void add_third(const T (&x)[8], const T& two, const T& one,
                                                              T (&sums)[70]) {
  add_last<i, j, k, k + 1>(x, max_number(two, one + x[k]), max_number(one, x[k]), sums);
  if constexpr (k < 6) add_third<i, j, k + 1>(x, two, one, sums);
}
template <int i, int j, class T> GPU_FN void add_second(const T (&x)[8], T (&sums)[70]) {
  add_third<i, j, j + 1>(x, x[i] + x[j], max_number(x[i], x[j]), sums);
  if constexpr (j < 5) add_second<i, j + 1>(x, sums);
}
template <int i, class T> GPU_FN void add_fours(const T (&x)[8], T (&sums)[70]) {
  add_second<i, i + 1>(x, sums);
  if constexpr (i < 4) add_fours<i + 1>(x, sums);
}
}  // namespace gpu
