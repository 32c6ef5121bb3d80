// Elements that one access moves, as they lie in memory; of width 1, its value.
#pragma once
#include "vectors.h"

namespace gpu {
template <class Math, int width, i32 fixed> struct Cells {
  Words words;

  GPU_FN void load(const u8* p, i32, i64 index) { words = load_words<width>(p + index * bytes_of(fixed), fixed); }
  GPU_FN void get(Math (&x)[width], i32) const { unpack(x, words, fixed); }
  GPU_FN static void store(u8* p, i32, i64 index, const Math (&x)[width]) {
    store_words<width>(p + index * bytes_of(fixed), fixed, pack(x, fixed));
  }
};
template <class Math, i32 fixed> struct Cells<Math, 1, fixed> {
  Math value[1];

  GPU_FN void load(const u8* p, i32 type, i64 index) { load_values(value, p, type, index); }
  GPU_FN void get(Math (&x)[1], i32) const { x[0] = value[0]; }
  GPU_FN static void store(u8* p, i32 type, i64 index, const Math (&x)[1]) { store_values(p, type, index, x); }
};
}  // namespace gpu
