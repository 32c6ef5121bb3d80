// Elements of any type as arithmetic sees them, a tile at a time: converted by functions that all operations
// share, so that an operation is compiled once however many element types it takes.
#pragma once
#include <cstdint>
#include <cstring>

#include "device/gpu.h"
#include "host/apex.h"

// Of all that a level's loops call. What is not inlined there is compiled for the baseline, without its instructions.
#define APEX_INLINE inline __attribute__((always_inline))
#define APEX_INLINE_LAMBDA __attribute__((always_inline))  // between a lambda's parameters and its body

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

// memcpy and memset, by the C library's functions: where g++ may use newer instructions it makes loops of a string
// instruction, whose start takes longer than moving a tile.
void copy_bytes(void* to, const void* from, int64_t bytes);
void clear_bytes(void* to, int64_t bytes);

// Elements [i, i + n) of a tensor: in place, or converted into `buffer`, which holds n.
template <class Math>
APEX_INLINE const Math* load_tile(const TileConversions<Math>& convert, const void* tensor, int32_t type, int64_t i,
                                  int64_t n, Math* buffer) {
  if (type == DtypeOf<Math>::value) return static_cast<const Math*>(tensor) + i;
  convert.load[type](buffer, tensor, i, n);
  return buffer;
}
// Where elements [i, i + n) of a tensor are made: in place, or in `buffer`, out of which store_tile converts them.
template <class Math> APEX_INLINE Math* made_tile(void* tensor, int32_t type, int64_t i, Math* buffer) {
  return type == DtypeOf<Math>::value ? static_cast<Math*>(tensor) + i : buffer;
}
template <class Math>
APEX_INLINE void store_tile(const TileConversions<Math>& convert, void* tensor, int32_t type, int64_t i, int64_t n,
                            const Math* x) {
  if (type != DtypeOf<Math>::value) convert.store[type](tensor, i, x, n);
  else if (Math* to = static_cast<Math*>(tensor) + i; to != x) copy_bytes(to, x, n * int64_t(sizeof(Math)));
}
}  // namespace apex
