// Elements of any type as arithmetic sees them, a tile at a time: converted by functions that all operations
// share, so that an operation is compiled once however many element types it takes.
#pragma once
#include <cstdint>
#include <cstring>

#include "device/gpu.h"
#include "host/apex.h"

#define APEX_INLINE inline __attribute__((always_inline))

namespace apex {
template <class T> struct DtypeOf;
template <> struct DtypeOf<float> { static constexpr int32_t value = APEX_F32; };
template <> struct DtypeOf<double> { static constexpr int32_t value = APEX_F64; };
template <> struct DtypeOf<gpu::half> { static constexpr int32_t value = APEX_F16; };
template <> struct DtypeOf<gpu::bfloat16> { static constexpr int32_t value = APEX_BF16; };

constexpr int64_t tile = 256;  // elements; a few of them stay in the first-level cache

// Of elements [i, i + n) of a tensor. By apex_dtype; null where no operation has such elements beside this arithmetic.
template <class Math> struct TileConversions {
  void (*load[4])(Math* x, const void* elements, int64_t i, int64_t n);
  void (*store[4])(void* elements, int64_t i, const Math* x, int64_t n);
};

// Whether they hold conversions for elements T.
template <class Math, class T>
constexpr bool tile_converts = sizeof(T) < sizeof(Math) && (sizeof(Math) == 4 || DtypeOf<T>::value == APEX_F32);

// For an x86-64 level (1 elsewhere).
const TileConversions<float>& tile_conversions(int level, float);
const TileConversions<double>& tile_conversions(int level, double);

// Elements [i, i + n) of a tensor: in place, or converted into `buffer`. n is at most `tile`.
template <class Math>
APEX_INLINE const Math* load_tile(const TileConversions<Math>& convert, const void* tensor, int32_t type, int64_t i,
                                  int64_t n, Math* buffer) {
  if (type == DtypeOf<Math>::value) return static_cast<const Math*>(tensor) + i;
  convert.load[type](buffer, tensor, i, n);
  return buffer;
}
template <class Math>
APEX_INLINE void store_tile(const TileConversions<Math>& convert, void* tensor, int32_t type, int64_t i, int64_t n,
                            const Math* x) {
  if (type == DtypeOf<Math>::value) std::memcpy(static_cast<Math*>(tensor) + i, x, size_t(n) * sizeof(Math));
  else convert.store[type](tensor, i, x, n);
}
}  // namespace apex
