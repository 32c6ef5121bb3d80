// Elements that one access moves, as they lie in memory; of width 1, its value.
#pragma once
#include "vectors.h"

namespace gpu {
// Two elements of any type but double, at a multiple of their size.
template <> struct Numbers<2> {
  Vector<u32, 2> words;

  GPU_FN void load(const u8* tensor, i32 type, i64 index) {
    const u8* const from = tensor + index * bytes_of(type);
    if (type == type_f32) words = *reinterpret_cast<const Vector<u32, 2>*>(from);
    else words.v[0] = *reinterpret_cast<const u32*>(from);
  }
  GPU_FN void get(float (&x)[2], i32 type) const {
    if (type == type_f32)
      GPU_UNROLL_FOR (int i = 0; i < 2; ++i) x[i] = bit_cast<float>(words.v[i]);
    else unpack(x, Words{{words.v[0], 0, 0, 0}}, type);
  }
};

template <class Math, int width, i32 fixed> struct Cells {
  Words words;

  GPU_FN void load(const u8* p, i32, i64 index) { words = load_words<width>(p + index * bytes_of(fixed), fixed); }
  GPU_FN void get(Math (&x)[width], i32) const { unpack(x, words, fixed); }
  GPU_FN static void store(u8* p, i32, i64 index, const Math (&x)[width]) {
    store_words<width>(p + index * bytes_of(fixed), fixed, pack(x, fixed));
  }
};
template <class Math, i32 fixed> struct Cells<Math, 2, fixed> {
  Numbers<2> numbers;

  GPU_FN void load(const u8* p, i32, i64 index) { numbers.load(p, fixed, index); }
  GPU_FN void get(Math (&x)[2], i32) const { numbers.get(x, fixed); }
  GPU_FN static void store(u8* p, i32, i64 index, const Math (&x)[2]) {
    u8* const to = p + index * bytes_of(fixed);
    if (fixed == type_f32)
      *reinterpret_cast<Vector<u32, 2>*>(to) = Vector<u32, 2>{{bit_cast<u32>(x[0]), bit_cast<u32>(x[1])}};
    else *reinterpret_cast<u32*>(to) = pack(x, fixed).v[0];
  }
};
template <class Math, i32 fixed> struct Cells<Math, 1, fixed> {
  Math value[1];

  GPU_FN void load(const u8* p, i32 type, i64 index) { load_values(value, p, type, index); }
  GPU_FN void get(Math (&x)[1], i32) const { x[0] = value[0]; }
  GPU_FN static void store(u8* p, i32 type, i64 index, const Math (&x)[1]) { store_values(p, type, index, x); }
};
}  // namespace gpu
