// What the CPU variants of batch norm share: tiles of elements as arithmetic sees them.
#pragma once
#include <algorithm>
#include <cstring>

#include "host/lanes.h"
#include "host/multi_tensor_cpu.h"

namespace apex {
// Two sums, of the pairs that `values` gives for j in [0, n), of some at a time: fewer roundings come one after the
// other.
template <class Math> struct Pair { Math first, second; };
template <class Math, class Values> APEX_INLINE Pair<Math> sums_of(int64_t n, const Values& values) {
  constexpr int64_t at_once = 16 * lanes;
  Lanes<Added, Math> first(Math(0)), second(Math(0));
  for (int64_t i = 0; i < n; i += at_once) {
    Lanes<Added, Math> some(Math(0)), others(Math(0));
    each_lane(std::min<int64_t>(at_once, n - i), [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA {
      const Pair<Math> value = values(i + j);
      some.of[l] += value.first;
      others.of[l] += value.second;
    });
    first.take(some);
    second.take(others);
  }
  return {first.whole(), second.whole()};
}
// How many rows of `n` adjacent channels, of `channels`, lie in memory without a gap, and are converted at once.
constexpr int64_t piece = 1024;  // elements
inline int64_t rows_at_once(int64_t n, int64_t channels) { return n == channels ? std::max<int64_t>(1, piece / n) : 1; }

// ---- masks: bit i % 8 of byte i / 8 for element i of memory --------------------------------------------
// Ones where bits [i, i + n) are set, zeros elsewhere.
APEX_INLINE void load_bits(const uint8_t* bitmask, int64_t i, int64_t n, uint8_t* flags) {
  for (int64_t j = 0; j < n; ++j) flags[j] = bitmask[(i + j) / 8] >> ((i + j) % 8) & 1;
}
// Sets bits [i, i + n) where there are ones; those that were not set must be 0.
APEX_INLINE void store_bits(uint8_t* bitmask, int64_t i, int64_t n, const uint8_t* flags) {
  int64_t j = 0;
  if (i % 8 == 0) {
    for (; j + 8 <= n; j += 8) {
      uint64_t eight;
      std::memcpy(&eight, flags + j, 8);
      bitmask[(i + j) / 8] = uint8_t(eight * 0x0102040810204080ull >> 56);  // the lowest bits of eight bytes in one
    }
  }
  for (; j < n; ++j) bitmask[(i + j) / 8] |= uint8_t(flags[j] << ((i + j) % 8));
}
// A tile with zeros where the mask has them, in `buffer`; the tile itself where there is no mask.
template <class Math>
APEX_INLINE const Math* mask_tile(const uint8_t* bitmask, int64_t i, int64_t n, const Math* x, Math* buffer) {
  if (!bitmask) return x;
  uint8_t flags[piece];
  load_bits(bitmask, i, n, flags);
  for (int64_t j = 0; j < n; ++j) buffer[j] = flags[j] ? x[j] : Math(0);
  return buffer;
}
}  // namespace apex
