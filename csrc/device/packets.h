// Elements of a type known at compile time, 16 bytes of them at once.
#pragma once
#include "vectors.h"

namespace gpu {
template <i32 type> struct Packet {
  using Math = float;
  static constexpr int size = type == type_f32 ? 4 : 2, width = 16 / size;
  using Raw = Words;
  GPU_FN static void unpack_raw(float (&x)[width], const Raw& raw) { unpack(x, raw, type); }
  GPU_FN static Raw pack_raw(const float (&x)[width]) { return pack(x, type); }
};
template <> struct Packet<type_f64> {
  using Math = double;
  static constexpr int size = 8, width = 2;
  using Raw = Vector<double, 2>;
  GPU_FN static void unpack_raw(double (&x)[2], const Raw& raw) { x[0] = raw.v[0], x[1] = raw.v[1]; }
  GPU_FN static Raw pack_raw(const double (&x)[2]) { return Raw{{x[0], x[1]}}; }
};

template <class Math> GPU_FN Math load_one(const u8* tensor, i32 type, i64 index) {
  Math x[1];
  load_values(x, tensor, type, index);
  return x[0];
}
template <class Math> GPU_FN void store_one(u8* tensor, i32 type, i64 index, Math value) {
  const Math x[1] = {value};
  store_values(tensor, type, index, x);
}
}  // namespace gpu
