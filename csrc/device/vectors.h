// Elements whose type is known only at run time, a vector at a time.
//
// Row operations see tensors of several types at once (input, output, weight); a kernel for each combination would
// be hundreds. Here the type is an argument: the branch on it is the same for all threads and is taken once a vector,
// which memory-bound kernels do not notice.
#pragma once
#include "gpu.h"

namespace gpu {
// As apex_dtype of csrc/host/apex.h.
constexpr i32 type_f32 = 0, type_f16 = 1, type_bf16 = 2, type_f64 = 3;
GPU_FN i32 bytes_of(i32 type) { return type == type_f64 ? 8 : type == type_f32 ? 4 : 2; }
// The element type of a kernel: known when it is compiled, or as the arguments say.
constexpr i32 any_type = -1;
template <i32 fixed> GPU_FN i32 known_type(i32 type) { return fixed == any_type ? type : fixed; }

// ---- words of memory: `width` elements in one access ---------------------------------------------------
// Eight elements are of two bytes each; four are of four or two.
using Words = Vector<u32, 4>;

template <int width> GPU_FN Words load_words(const u8* p, i32 type) {
  static_assert(width == 4 || width == 8, "one access moves at most 16 bytes");
  if (width == 8 || type == type_f32) return *reinterpret_cast<const Words*>(p);
  const Vector<u32, 2> half = *reinterpret_cast<const Vector<u32, 2>*>(p);
  return Words{{half.v[0], half.v[1], 0, 0}};
}
template <int width> GPU_FN void store_words(u8* p, i32 type, const Words& w) {
  if (width == 8 || type == type_f32) *reinterpret_cast<Words*>(p) = w;
  else *reinterpret_cast<Vector<u32, 2>*>(p) = Vector<u32, 2>{{w.v[0], w.v[1]}};
}

template <int width> GPU_FN void unpack(float (&x)[width], const Words& w, i32 type) {
  if (width == 4 && type == type_f32) {
    GPU_UNROLL_FOR (int i = 0; i < 4; ++i) x[i % width] = bit_cast<float>(w.v[i]);
  } else if (type == type_bf16) {
    GPU_UNROLL_FOR (int i = 0; i < width / 2; ++i) {
      x[2 * i] = bit_cast<float>(w.v[i] << 16);
      x[2 * i + 1] = bit_cast<float>(w.v[i] & 0xffff0000u);
    }
  } else {
    GPU_UNROLL_FOR (int i = 0; i < width / 2; ++i) {
      x[2 * i] = to_float(half{(u16)(w.v[i] & 0xffffu)});
      x[2 * i + 1] = to_float(half{(u16)(w.v[i] >> 16)});
    }
  }
}
template <class T> GPU_FN u32 pack_two(float low, float high) {
  T a, b;
  from_float(a, low);
  from_float(b, high);
  return (u32)b.bits << 16 | a.bits;
}
#if defined(GPU_CUDA) && __CUDA_ARCH__ >= 800
// One instruction converts both.
template <> GPU_FN u32 pack_two<bfloat16>(float low, float high) {
  u32 two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
template <> GPU_FN u32 pack_two<half>(float low, float high) {
  u32 two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
#endif
template <int width> GPU_FN Words pack(const float (&x)[width], i32 type) {
  Words w{};
  if (width == 4 && type == type_f32)
    GPU_UNROLL_FOR (int i = 0; i < 4; ++i) w.v[i] = bit_cast<u32>(x[i % width]);
  else if (type == type_bf16)
    GPU_UNROLL_FOR (int i = 0; i < width / 2; ++i) w.v[i] = pack_two<bfloat16>(x[2 * i], x[2 * i + 1]);
  else
    GPU_UNROLL_FOR (int i = 0; i < width / 2; ++i) w.v[i] = pack_two<half>(x[2 * i], x[2 * i + 1]);
  return w;
}

// ---- elements [index, index + width) of a tensor of any type -------------------------------------------
// Vectors need an address that is a multiple of their size, or of 16 bytes if that is smaller.
template <int width> GPU_FN void load_values(float (&x)[width], const u8* tensor, i32 type, i64 index) {
  if constexpr (width == 1) {
    if (type == type_f32) x[0] = reinterpret_cast<const float*>(tensor)[index];
    else if (type == type_bf16) x[0] = to_float(reinterpret_cast<const bfloat16*>(tensor)[index]);
    else x[0] = to_float(reinterpret_cast<const half*>(tensor)[index]);
  } else if (width == 8 && type == type_f32) {
    const Words* p = reinterpret_cast<const Words*>(tensor + index * 4);
    const Words a = p[0], b = p[1];
    GPU_UNROLL_FOR (int i = 0; i < width / 2; ++i) {
      x[i] = bit_cast<float>(a.v[i]);
      x[width / 2 + i] = bit_cast<float>(b.v[i]);
    }
  } else {
    unpack(x, load_words<width>(tensor + index * bytes_of(type), type), type);
  }
}
template <int width> GPU_FN void store_values(u8* tensor, i32 type, i64 index, const float (&x)[width]) {
  if constexpr (width == 1) {
    if (type == type_f32) reinterpret_cast<float*>(tensor)[index] = x[0];
    else if (type == type_bf16) from_float(reinterpret_cast<bfloat16*>(tensor)[index], x[0]);
    else from_float(reinterpret_cast<half*>(tensor)[index], x[0]);
  } else if (width == 8 && type == type_f32) {
    Words a, b;
    GPU_UNROLL_FOR (int i = 0; i < width / 2; ++i) {
      a.v[i] = bit_cast<u32>(x[i]);
      b.v[i] = bit_cast<u32>(x[width / 2 + i]);
    }
    Words* p = reinterpret_cast<Words*>(tensor + index * 4);
    p[0] = a;
    p[1] = b;
  } else {
    store_words<width>(tensor + index * bytes_of(type), type, pack(x, type));
  }
}
GPU_FN void load_values(double (&x)[1], const u8* tensor, i32, i64 index) {
  x[0] = reinterpret_cast<const double*>(tensor)[index];
}
GPU_FN void store_values(u8* tensor, i32, i64 index, const double (&x)[1]) {
  reinterpret_cast<double*>(tensor)[index] = x[0];
}
// The same in two steps, so that what is loaded later need not wait: as they lie in memory, then as numbers. Of floats
// a vector of eight lies at a multiple of 16 bytes.
template <int width> struct Numbers {
  Words words[width / 4];

  GPU_FN void load(const u8* tensor, i32 type, i64 index) {
    const u8* const from = tensor + index * bytes_of(type);
    words[0] = load_words<width>(from, type);
    if constexpr (width == 8)
      if (type == type_f32) words[1] = *reinterpret_cast<const Words*>(from + sizeof(Words));
  }
  GPU_FN void get(float (&x)[width], i32 type) const {
    if (width == 8 && type == type_f32)
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = bit_cast<float>(words[i / 4].v[i % 4]);
    else unpack(x, words[0], type);
  }
};
// What a tensor of that type holds once these values are stored in it.
template <int width> GPU_FN void round_values(float (&x)[width], i32 type) {
  if (type == type_f32) return;
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
    if (type == type_bf16) {
      bfloat16 y;
      from_float(y, x[i]);
      x[i] = to_float(y);
    } else {
      half y;
      from_float(y, x[i]);
      x[i] = to_float(y);
    }
  }
}
GPU_FN void round_values(double (&)[1], i32) {}
}  // namespace gpu
