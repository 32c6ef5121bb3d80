// What the CPU variants of batch norm share: tiles of elements as arithmetic sees them.
#pragma once
#include <algorithm>
#include <cstring>

#include "host/lanes.h"
#include "host/multi_tensor_cpu.h"

namespace apex {
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
  uint8_t flags[tile];
  load_bits(bitmask, i, n, flags);
  for (int64_t j = 0; j < n; ++j) buffer[j] = flags[j] ? x[j] : Math(0);
  return buffer;
}
}  // namespace apex
