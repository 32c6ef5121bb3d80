// Reductions of many elements in independent lanes: they vectorise, several are under way at once, and their order is
// fixed, whatever the x86-64 level.
#pragma once
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
  template <class Math> static APEX_INLINE Math combine(Math a, Math b) { return a + b; }
};
struct Highest {
  template <class Math> static APEX_INLINE Math combine(Math a, Math b) { return gpu::max_number(a, b); }
};
template <class Reduction, class Math> struct Lanes {
  alignas(64) Math of[lanes];

  APEX_INLINE explicit Lanes(Math start) {
    for (int64_t l = 0; l < lanes; ++l) of[l] = start;
  }
  // value(j) for j in [0, n).
  template <class Value> APEX_INLINE void take(int64_t n, const Value& value) {
    each_lane(n, [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA { of[l] = Reduction::combine(of[l], value(j)); });
  }
  template <class Other> APEX_INLINE void take(const Lanes<Reduction, Other>& other) {
    for (int64_t l = 0; l < lanes; ++l) of[l] = Reduction::combine(of[l], Math(other.of[l]));
  }
  APEX_INLINE Math whole() const {
    Lanes rest = *this;
    rest.template fold<lanes / 2>();
    return rest.of[0];
  }

 private:
  template <int64_t half> APEX_INLINE void fold() {
    for (int64_t l = 0; l < half; ++l) of[l] = Reduction::combine(of[l], of[l + half]);
    if constexpr (half > 1) fold<half / 2>();
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
