// A block's tile of FP8 codes: its rows go to memory as they are, its columns through shared memory.
//
// A thread has 8 rows of `width` columns; 16 threads lie side by side, and 16 of these rows of threads on top of each
// other. What becomes 8 rows of a column is 8 bytes of the transpose: a unit. Units of a column lie in shared memory
// one behind the other, moved about by the column's number, so that neither threads side by side nor on top of each
// other meet in a bank.
#pragma once
#include "fp8.h"
#include "reduce.h"

namespace gpu {
constexpr int fp8_tile_threads = 256, fp8_lanes = 16, fp8_groups = 16, fp8_tall = 8;
constexpr int fp8_tile_rows = fp8_groups * fp8_tall;

#if !defined(GPU_HOST)
// Byte i of word k becomes byte k of word i.
GPU_FN void transpose_bytes(u32 (&w)[4]) {
#if defined(GPU_CUDA)
  const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
#else
  u32 made[4];
  GPU_UNROLL_FOR (int i = 0; i < 4; ++i) {
    made[i] = 0;
    GPU_UNROLL_FOR (int k = 0; k < 4; ++k) made[i] |= ((w[k] >> 8 * i) & 0xffu) << 8 * k;
  }
  GPU_UNROLL_FOR (int i = 0; i < 4; ++i) w[i] = made[i];
#endif
}

template <int width> struct Fp8Tile {
  static constexpr int words = width < 4 ? 1 : width / 4, columns = fp8_lanes * width;
  static constexpr int shared_words = columns * fp8_groups / 2;  // of 16 bytes, two units each
  static_assert(width == 1 || width % 4 == 0, "a row of a thread is a byte or whole words");

  u32 code[fp8_tall][words];

  template <bool ocp = false> GPU_FN void encode(const Fp8& form, int k, const float (&x)[width]) {
    if constexpr (width == 1) {
      code[k][0] = form.encode(x[0]);
    } else {
      GPU_UNROLL_FOR (int w = 0; w < words; ++w)
        code[k][w] = form.template encode_four<ocp>({x[4 * w], x[4 * w + 1], x[4 * w + 2], x[4 * w + 3]});
    }
  }
  GPU_FN void clear(int k) {
    GPU_UNROLL_FOR (int w = 0; w < words; ++w) code[k][w] = 0;
  }
  GPU_FN void load_row(int k, const u8* from) {
    if constexpr (width == 1) {
      code[k][0] = *from;
    } else {
      const Vector<u32, words> found = *reinterpret_cast<const Vector<u32, words>*>(from);
      GPU_UNROLL_FOR (int w = 0; w < words; ++w) code[k][w] = found.v[w];
    }
  }
  GPU_FN void store_row(int k, u8* to) const {
    if constexpr (width == 1) {
      *to = (u8)code[k][0];
    } else {
      Vector<u32, words> made;
      GPU_UNROLL_FOR (int w = 0; w < words; ++w) made.v[w] = code[k][w];
      *reinterpret_cast<Vector<u32, words>*>(to) = made;
    }
  }

  // The tile's columns [column0, ...) to `out`, [columns][rows]. vectors: the rows of `out` begin at a multiple of 16
  // bytes. The whole block comes here; `shared` is free once it has met again.
  GPU_FN void store_columns(Words* shared, u8* out, i64 row0, i64 rows, i64 column0, i64 columns_end,
                            bool vectors) const {
    const u32 lane = thread_x() % fp8_lanes, group = thread_x() / fp8_lanes;
    Vector<u32, 2>* const units = reinterpret_cast<Vector<u32, 2>*>(shared);
    GPU_UNROLL_FOR (int w = 0; w < words; ++w) {
      u32 low[4], high[4];
      GPU_UNROLL_FOR (int k = 0; k < 4; ++k) low[k] = code[k][w], high[k] = code[k + 4][w];
      transpose_bytes(low);
      transpose_bytes(high);
      GPU_UNROLL_FOR (int i = 0; i < (width < 4 ? width : 4); ++i)
        units[(lane * width + 4 * w + i) * fp8_groups + (group ^ lane)] = Vector<u32, 2>{{low[i], high[i]}};
    }
    sync_threads();
    for (u32 pair = thread_x(); pair < shared_words; pair += fp8_tile_threads) {
      const u32 in_tile = pair / (fp8_groups / 2), high = pair % (fp8_groups / 2), moved = in_tile / width;
      const i64 column = column0 + in_tile, row = row0 + high * 16;
      if (column >= columns_end || row >= rows) continue;
      const Words found = shared[in_tile * (fp8_groups / 2) + (high ^ moved >> 1)];
      const bool swapped = moved & 1;
      const Words made = {{swapped ? found.v[2] : found.v[0], swapped ? found.v[3] : found.v[1],
                           swapped ? found.v[0] : found.v[2], swapped ? found.v[1] : found.v[3]}};
      store_bytes(out + column * rows + row, made, rows - row, vectors);
    }
  }

 private:
  GPU_FN static void store_bytes(u8* to, const Words& w, i64 left, bool vectors) {
    if (vectors && left >= 16) {
      *reinterpret_cast<Words*>(to) = w;
      return;
    }
    GPU_UNROLL_FOR (int i = 0; i < 16; ++i)
      if (i < left) to[i] = (u8)(w.v[i / 4] >> 8 * (i % 4));
  }
};

// The sums of a block's threads on top of each other, in order, to partials[column0 ...] of this block's rows.
template <int width>
GPU_FN void store_column_sums(float* shared, const float (&sums)[width], float* partials, i64 column0,
                              i64 columns_end) {
  constexpr u32 columns = fp8_lanes * width;
  const u32 lane = thread_x() % fp8_lanes, group = thread_x() / fp8_lanes;
  sync_threads();
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) shared[group * columns + lane * width + i] = sums[i];
  sync_threads();
  const u32 column = thread_x();
  if (column < columns && column0 + column < columns_end) {
    float total = 0.0f;
    for (u32 k = 0; k < fp8_groups; ++k) total += shared[k * columns + column];
    partials[column0 + column] = total;
  }
}

GPU_FN void atomic_max(i32* p, i32 x) {
#if defined(GPU_CUDA)
  ::atomicMax(p, x);
#elif defined(GPU_HIP)
  __hip_atomic_fetch_max(p, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
  *p = x > *p ? x : *p;  // the executor runs one block at a time
#endif
}
// amax becomes max(amax, the block's largest), both of which are not negative.
GPU_FN void record_amax(float* amax, float largest) {
  if (!amax) return;
  largest = block_reduce<Maximum>(largest);
  if (thread_x() == 0) atomic_max(reinterpret_cast<i32*>(amax), bit_cast<i32>(largest));
}
#endif

// fp8_max / max(amax, epsilon), or 1 where that amax is 0, infinite or NaN; power_of_two: rounded down to one.
GPU_FN float current_scale(float amax, float fp8_max, float epsilon, bool power_of_two) {
  amax = amax < epsilon ? epsilon : amax;
  if (!(amax > 0.0f) || !is_finite(amax)) return 1.0f;
  float scale = fp8_max / amax;
  scale = scale > 3.4028235e38f ? 3.4028235e38f : scale;
  return power_of_two ? bit_cast<float>(bit_cast<u32>(scale) & 0x7f800000u) : scale;
}

// max |x|; a nan is left out.
GPU_FN float larger_magnitude(float largest, float x) {
  const float magnitude = bit_cast<float>(bit_cast<u32>(x) & 0x7fffffffu);
  return magnitude > largest ? magnitude : largest;
}
}  // namespace gpu
