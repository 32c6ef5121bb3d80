// Reductions of many elements in independent lanes: they vectorise, several are under way at once, and their order is
// fixed, whatever the x86-64 level.
#pragma once
#include <cstring>

#include "device/exponential.h"
#include "host/multi_tensor_tiles.h"

namespace apex {
constexpr int64_t lanes = 32;  // g++ unrolls loops of up to 16 before it could vectorise them

// body(j, j % lanes) for j in [0, n). No element depends on another.
template <class Body> APEX_INLINE void each_lane(int64_t n, const Body& body) {
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
#pragma GCC ivdep
    for (int64_t l = 0; l < lanes; ++l) body(j + l, l);
  }
#pragma GCC ivdep
  for (int64_t l = 0; l < n - j; ++l) body(j + l, l);
}

struct Added {
  template <class Math> static APEX_INLINE void take(Math& a, const Math& b) { a = a + b; }
};
struct Highest {
  template <class Math> static APEX_INLINE void take(Math& a, const Math& b) { a = b > a ? b : a; }
};
// `count` numbers in registers, by g++'s vector extension.
template <class Math, int64_t count> struct VectorOf {
  typedef Math Type __attribute__((vector_size(count * sizeof(Math))));
};
template <class Reduction, class Math> struct Lanes {
  alignas(64) Math of[lanes];

  APEX_INLINE explicit Lanes(Math start) {
    for (int64_t l = 0; l < lanes; ++l) of[l] = start;
  }
  // value(j) for j in [0, n).
  template <class Value> APEX_INLINE void take(int64_t n, const Value& value) {
    each_lane(n, [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA { Reduction::take(of[l], value(j)); });
  }
  template <class Other> APEX_INLINE void take(const Lanes<Reduction, Other>& other) {
    for (int64_t l = 0; l < lanes; ++l) Reduction::take(of[l], Math(other.of[l]));
  }
  APEX_INLINE Math whole() const { return fold<lanes>(of); }

 private:
  // In halves: g++ has the lower and the upper one of a register at once, but not of an array.
  template <int64_t count> static APEX_INLINE Math fold(const void* from) {
    typename VectorOf<Math, count / 2>::Type low, high;
    std::memcpy(&low, from, sizeof(low));
    std::memcpy(&high, static_cast<const char*>(from) + sizeof(low), sizeof(high));
    Reduction::take(low, high);
    if constexpr (count > 4) return fold<count / 2>(&low);
    Math first = low[0];
    Reduction::take(first, Math(low[1]));
    return first;
  }
};

// The sum of value(j) for j in [0, n), of some at a time: fewer roundings come one after the other.
template <class Math, class Value> APEX_INLINE Math sum_of(int64_t n, const Value& value) {
  constexpr int64_t at_once = 16 * lanes;
  Lanes<Added, Math> sum(Math(0));
  if (n <= at_once) {
    sum.take(n, value);
  } else {
    for (int64_t i = 0; i < n; i += at_once) {
      Lanes<Added, Math> some(Math(0));
      some.take(n - i < at_once ? n - i : at_once, [&](int64_t j) APEX_INLINE_LAMBDA { return value(i + j); });
      sum.take(some);
    }
  }
  return sum.whole();
}
}  // namespace apex
