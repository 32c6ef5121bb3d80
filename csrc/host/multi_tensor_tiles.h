// Elements of any type as arithmetic sees them, a tile at a time: converted by functions that all operations
// share, so that an operation is compiled once however many element types it takes.
#pragma once
#include <cstdint>
#include <cstring>

#include "host/dtypes.h"

// Of all that a level's loops call. What is not inlined there is compiled for the baseline, without its instructions.
#define APEX_INLINE inline __attribute__((always_inline))
#define APEX_INLINE_LAMBDA __attribute__((always_inline))  // between a lambda's parameters and its body

namespace apex {
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

// Whether an output of so many elements is written past the caches: it is larger than what they keep of it, and a line
// need not be read first where all of it is written. Reading it next takes as long. Never where no instruction does it.
bool is_streamed(int64_t elements, int32_t type);
// copy_bytes past the caches, where both ends of `to` are those of a line. `finish_streams` is to follow.
void stream_bytes(void* to, const void* from, int64_t bytes);
// Whether rows of a tensor of so many elements are asked for while the row before is in work: it is larger than what a
// processor's own caches keep, and memory would be idle where a pass over these comes between two over memory.
bool is_fetched(int64_t elements, int32_t type);
// Asks for elements [i, i + n) of a tensor, or what lies behind its end.
APEX_INLINE void fetch_tile(const void* tensor, int32_t type, int64_t i, int64_t n) {
  const int64_t size = bytes_of(type);
  const char* from = static_cast<const char*>(tensor) + i * size;
  for (int64_t at = 0; at < n * size; at += 64) __builtin_prefetch(from + at);
}
// The same ahead of a pass in memory's order that works on elements in place; a conversion asks for what it reads.
template <class Math> APEX_INLINE void fetch_ahead(const void* tensor, int32_t type, int64_t i, int64_t n) {
  constexpr int64_t ahead = 4096;
  if (type == DtypeOf<Math>::value) fetch_tile(tensor, type, i + ahead, n);
}
// What this thread streamed is there for others.
APEX_INLINE void finish_streams() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// Elements [i, i + n) of a tensor: in place, or converted into `buffer`, which holds n.
template <class Math>
APEX_INLINE const Math* load_tile(const TileConversions<Math>& convert, const void* tensor, int32_t type, int64_t i,
                                  int64_t n, Math* buffer) {
  if (type == DtypeOf<Math>::value) return static_cast<const Math*>(tensor) + i;
  convert.load[type](buffer, tensor, i, n);
  return buffer;
}
// Where elements [i, i + n) of a tensor are made: in place, or in `buffer`, out of which store_tile converts or streams
// them.
template <class Math>
APEX_INLINE Math* made_tile(void* tensor, int32_t type, int64_t i, Math* buffer, bool streamed = false) {
  return type == DtypeOf<Math>::value && !streamed ? static_cast<Math*>(tensor) + i : buffer;
}
template <class Math>
APEX_INLINE void stream_tile(const TileConversions<Math>& convert, void* tensor, int32_t type, int64_t i, int64_t n,
                             const Math* x) {
  if (type == DtypeOf<Math>::value) return stream_bytes(static_cast<Math*>(tensor) + i, x, n * int64_t(sizeof(Math)));
  alignas(64) char narrow[tile * sizeof(float)];
  const int64_t size = bytes_of(type);
  for (int64_t j = 0; j < n; j += tile) {
    const int64_t some = n - j < tile ? n - j : tile;
    convert.store[type](narrow, 0, x + j, some);
    stream_bytes(static_cast<char*>(tensor) + (i + j) * size, narrow, some * size);
  }
}
template <class Math>
APEX_INLINE void store_tile(const TileConversions<Math>& convert, void* tensor, int32_t type, int64_t i, int64_t n,
                            const Math* x, bool streamed = false) {
  if (streamed) stream_tile(convert, tensor, type, i, n, x);
  else if (type != DtypeOf<Math>::value) convert.store[type](tensor, i, x, n);
  else if (Math* to = static_cast<Math*>(tensor) + i; to != x) copy_bytes(to, x, n * int64_t(sizeof(Math)));
}
}  // namespace apex
