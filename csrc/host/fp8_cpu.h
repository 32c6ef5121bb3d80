// What CPU variants of FP8 casts share: codes of a tile, a transpose in pieces, the largest number of all threads.
#pragma once
#include <algorithm>
#include <cstring>

#include "device/fp8_tile.h"
#include "multi_tensor_cpu.h"

namespace apex {
constexpr int64_t fp8_rows = gpu::fp8_tile_rows;  // of a task

// amax becomes max(amax, largest), of which the bits of a float are given; neither is negative.
inline void record_amax_cpu(float* amax, int32_t largest) {
  if (!amax) return;
  int32_t* const bits = reinterpret_cast<int32_t*>(amax);
  int32_t found = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (found < largest &&
         !__atomic_compare_exchange_n(bits, &found, largest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

APEX_INLINE void encode_tile(const gpu::Fp8& form, const float* x, float scale, int64_t n, uint8_t* codes) {
  for (int64_t j = 0; j < n; ++j) codes[j] = uint8_t(form.encode(x[j] * scale));
}
// max |x|, as the bits of a float, which are in the same order; nan is left out.
APEX_INLINE int32_t largest_of_tile(int32_t largest, const float* x, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    const int32_t magnitude = gpu::bit_cast<int32_t>(x[j]) & 0x7fffffff;
    largest = std::max(largest, magnitude > 0x7f800000 ? 0 : magnitude);
  }
  return largest;
}
// Rows [0, rows) of `columns` codes each, `pitch` apart, to the columns of `out`, which are out_pitch apart.
APEX_INLINE void transpose_codes(const uint8_t* codes, int64_t pitch, int64_t rows, int64_t columns, uint8_t* out,
                                 int64_t out_pitch) {
  constexpr int64_t piece = 16;
  for (int64_t column = 0; column < columns; column += piece)
    for (int64_t c = column; c < std::min(columns, column + piece); ++c)
      for (int64_t r = 0; r < rows; ++r) out[c * out_pitch + r] = codes[r * pitch + c];
}
// The sums of columns from those of their parts, in order; `out` is of `type`.
inline void sum_parts_cpu(const float* partials, int64_t parts, int64_t columns, uint8_t* out, int32_t type) {
  for (int64_t column = 0; column < columns; ++column) {
    float total[1] = {0.0f};
    for (int64_t part = 0; part < parts; ++part) total[0] += partials[part * columns + column];
    gpu::store_values(out, type, column, total);
  }
}
}  // namespace apex
