// What the softmax kernels share: exponentials, the threads that share a row, and a row in memory.
#pragma once
#include "exponential.h"
#include "philox.h"
#include "reduce.h"
#include "scaled_masked_softmax.h"
#include "vectors.h"

namespace gpu {
#if !defined(GPU_HOST)
struct Highest {
  template <class T> static GPU_FN T combine(T a, T b) { return max_number(a, b); }
  template <class T> static GPU_FN T nothing() { return minus_infinity(T()); }
};
struct Total {
  template <class T> static GPU_FN T combine(T a, T b) { return a + b; }
  template <class T> static GPU_FN T nothing() { return T(0); }
};

GPU_FN i64 divide(i64 n, i64 by, i64* rest) {
  const bool narrow = !(((u64)n | (u64)by) >> 32);  // much faster
  const i64 quotient = narrow ? (i64)((u32)n / (u32)by) : (i64)((u64)n / (u64)by);
  *rest = n - quotient * by;
  return quotient;
}

// e^(magnitude * (x - top)). The difference is made first, so that large values lose no digits; `exact` keeps those of
// its product too, which show in floats and not in halves.
template <class Math, bool exact> struct Exponential;
template <bool exact> struct Exponential<float, exact> {
  float factor, rest;
  GPU_FN explicit Exponential(const SoftmaxForward& a) : factor(a.factor), rest(a.factor_rest) {}
  GPU_FN float operator()(float x, float top) const {
    const float difference = x - top, product = difference * factor;
    if constexpr (!exact) return exp2(product);
    const bool vanishes = product < -127.0f;  // not so of a nan
    const float kept = vanishes ? 0.0f : difference, shifted = (vanishes ? -127.0f : product) + 12582912.0f;
    // 1.5 * 2^23: the sum's last bits are a whole number.
    const float fraction = fma(kept, rest, fma(kept, factor, -(shifted - 12582912.0f)));
    return exp2(fraction) * bit_cast<float>((bit_cast<u32>(shifted) - (0x4b400000u - 127u)) << 23);
  }
};
template <> struct Exponential<double, true> {
  double magnitude;
  GPU_FN explicit Exponential(const SoftmaxForward& a) : magnitude(a.magnitude) {}
  GPU_FN double operator()(double x, double top) const { return exp_series((x - top) * magnitude); }
};
// p / sum.
template <bool exact, class Math> GPU_FN Math quotient(Math p, Math sum, Math reciprocal) {
  const Math q = p * reciprocal;
  return exact ? fma(fma(-q, sum, p), reciprocal, q) : q;
}

// ---- the threads that share a row -----------------------------------------------------------------------
// Some lanes of a warp, or the block. Threads that reduce together take part in every turn of the loop over rows:
// rows past the last keep nothing and are not written.
// `fixed`: so many whole warps, known when compiled: one of a block's, or all of a block.
template <class Math, int fixed = 0, u32 threads = softmax_threads> struct RowTeam {
  static constexpr u32 most_warps = threads / warp_size;  // of a block
  u32 rank, lanes;
  u32 warps, wide;    // of the block, and as a power of two; for blocks that share a row
  u32 turn = 0;       // reductions so far
  i64 first, stride;  // rows that the warp, or the block, takes at once
  u32 own;            // which of these is this thread's

  GPU_FN explicit RowTeam(i32 log_lanes) : warps(block_size_x() / warp_size), wide(1) {
    if (fixed == 1) {
      rank = lane_id();
      lanes = warp_size;
      own = 0;
      first = (i64)block_x() * warps + thread_x() / warp_size;
      stride = (i64)grid_x() * warps;
      warps = 0;
    } else if (fixed == 0 && log_lanes >= 0) {
      const u32 at_once = warp_size >> log_lanes;  // rows of a warp
      lanes = 1u << log_lanes;
      rank = lane_id() & (lanes - 1);
      own = lane_id() >> log_lanes;
      first = ((i64)block_x() * warps + thread_x() / warp_size) * at_once;
      stride = (i64)grid_x() * warps * at_once;
      warps = 0;
    } else {
      rank = thread_x();
      lanes = block_size_x();
      own = 0;
      first = block_x();
      stride = grid_x();
      while (wide < warps) wide *= 2;
    }
  }
  GPU_FN u32 size() const { return fixed ? (u32)(fixed * warp_size) : lanes; }
  // Every thread of the team gets the result. One barrier: the halves of `partial` take turns, and a warp that comes
  // back to one has met all others at the barrier between.
  template <class Reduction> GPU_FN Math reduce(Math x, Math (&partial)[2 * most_warps]) {
    if (fixed == 0 && warps == 0 && lanes < warp_size) {
      for (u32 mask = lanes / 2; mask; mask /= 2) x = Reduction::combine(x, shuffle_xor_value(x, (int)mask));
      return x;
    }
    x = warp_reduce<Reduction>(x);
    if (fixed == 1 || (fixed == 0 && warps <= 1)) return x;
    Math* const mine = partial + (turn++ & 1) * most_warps;
    if (lane_id() == 0) mine[thread_x() / warp_size] = x;
    sync_threads();
    if (fixed == 2) return Reduction::combine(mine[0], mine[1]);
    const u32 other = lane_id() & (wide - 1);
    x = other < warps ? mine[other] : Reduction::template nothing<Math>();
    for (u32 mask = wide / 2; mask; mask /= 2) x = Reduction::combine(x, shuffle_xor_value(x, (int)mask));
    return x;
  }
};

// ---- a row in memory ------------------------------------------------------------------------------------
// The vectors of 16 bytes in which a row of keys lies. `aligned`: rows begin and end with one.
template <i32 type, bool aligned> struct RowVectors {
  static constexpr int width = type == type_f32 ? 4 : 8;
  static constexpr i64 bytes = 16 / width;
  using Math = float;
  static constexpr bool exact = type == type_f32;
  i64 begin, elements;  // where vector 0 begins in the tensors, and where they end
  u32 shift;            // elements of vector 0 before the row
  u32 keys, length;     // elements of the row, and how many of them are kept
  u32 count, filled;    // vectors of the row, and of what is kept

  GPU_FN RowVectors(i32, i32 tensor_shift, i64 row, i64 rows, i64 keys_, i64 length_)
      : elements(rows * keys_), keys((u32)keys_), length((u32)length_) {
    begin = row * keys_;
    shift = aligned ? 0 : (u32)(begin + tensor_shift) % width;
    begin -= shift;
    count = row < rows ? (shift + keys + width - 1) / width : 0;
    filled = length == 0 || row >= rows ? 0 : (shift + length + width - 1) / width;
  }
  // Bit i: whether element i of a vector, which has some of the row's first `kept`, is none of these.
  GPU_FN u32 without(u32 vector, u32 kept) const {
    const u32 end = shift + kept - vector * width;
    u32 outside = end < width ? ((1u << width) - 1) & ~0u << end : 0;
    if (!aligned && vector == 0) outside |= (1u << shift) - 1;
    return outside;
  }
  GPU_FN u32 dropped(u32 vector) const { return without(vector, length); }
  // Whether nothing of a vector lies past the tensor's begin or end.
  GPU_FN bool inside(u32 vector) const {
    const i64 at = begin + (i64)vector * width;
    return aligned || (at >= 0 && at + width <= elements);
  }
  // The thread's vector at so many bytes from the tensor's begin, which is the row's number `vector`.
  GPU_FN Words load(const u8* tensor, i64 offset, u32 vector) const {
    if (inside(vector)) return *reinterpret_cast<const Words*>(tensor + offset);
    const i64 at = begin + (i64)vector * width;
    Words w{};  // the tensor's own edge; elements of other rows are of no account
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      if (at + i < 0 || at + i >= elements) continue;
      if (width == 4) w.v[i % 4] = reinterpret_cast<const u32*>(tensor)[at + i];
      else w.v[i / 2] |= (u32) reinterpret_cast<const u16*>(tensor)[at + i] << i % 2 * 16;
    }
    return w;
  }
  GPU_FN void store(u8* tensor, i64 offset, u32 vector, const Words& w) const {
    const u32 outside = aligned ? 0 : without(vector, keys);
    if (outside == 0) {
      *reinterpret_cast<Words*>(tensor + offset) = w;
    } else {
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        if (outside >> i & 1) continue;
        if (width == 4) reinterpret_cast<u32*>(tensor + offset)[i] = w.v[i % 4];
        else reinterpret_cast<u16*>(tensor + offset)[i] = (u16)(w.v[i / 2] >> i % 2 * 16);
      }
    }
  }
  // Bit i: whether the mask takes element i of the vector. `mask`: the row's.
  GPU_FN u32 load_mask(const u8* mask, u32 vector) const {
    u32 masked = 0;
    if constexpr (aligned) {
      const Vector<u32, width / 4> w = *reinterpret_cast<const Vector<u32, width / 4>*>(mask + vector * width);
      GPU_UNROLL_FOR (int k = 0; k < width / 4; ++k) {
        // A byte's lowest bit says whether it is not 0; the product brings the four side by side.
        const u32 ones = (((w.v[k] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | w.v[k]) >> 7 & 0x01010101u;
        masked |= (ones * 0x01020408u >> 24 & 0xfu) << 4 * k;
      }
    } else {
      const u32 outside = dropped(vector);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i)
        if (!(outside >> i & 1)) masked |= (mask[vector * width + i - shift] ? 1u : 0u) << i;
    }
    return masked;
  }
  // Adds the mask's numbers to the vector's; bit i: whether element i's is -inf. `mask`: the row's.
  GPU_FN u32 add_mask(float (&x)[width], const u8* mask, u32 vector) const {
    float m[width];
    if constexpr (aligned) {
      unpack(m, *reinterpret_cast<const Words*>(mask + vector * 16), type);
    } else {
      const u32 outside = dropped(vector);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i)
        m[i] = outside >> i & 1 ? 0.0f : load_one(mask, vector * width + i - shift);
    }
    u32 out = 0;
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      out |= (u32)(m[i] == minus_infinity(0.0f)) << i;
      x[i] += m[i];
    }
    return out;
  }
  // A byte for each element of the vector, as its bits say. `tensor`: of bytes.
  GPU_FN void store_bits(u8* tensor, u32 vector, u32 bits) const {
    u8* const to = tensor + begin + (i64)vector * width;
    const u32 outside = aligned ? 0 : without(vector, keys);
    if (outside == 0) {
      Vector<u32, width / 4> w;
      GPU_UNROLL_FOR (int k = 0; k < width / 4; ++k)
        w.v[k] = (bits >> 4 * k & 1) | (bits >> 4 * k & 2) << 7 | (bits >> 4 * k & 4) << 14 | (bits >> 4 * k & 8) << 21;
      *reinterpret_cast<Vector<u32, width / 4>*>(to) = w;
    } else {
      GPU_UNROLL_FOR (int i = 0; i < width; ++i)
        if (!(outside >> i & 1)) to[i] = (u8)(bits >> i & 1);
    }
  }
  GPU_FN i64 element(u32 vector) const { return begin + (i64)vector * width; }
  GPU_FN i64 offset_of(u32 vector) const { return begin * bytes + (i64)vector * 16; }
  GPU_FN void load_values(float (&x)[width], const u8* tensor, u32 vector) const {
    unpack(x, load(tensor, offset_of(vector), vector), type);
  }
  GPU_FN void store_values(u8* tensor, u32 vector, const float (&x)[width]) const {
    store(tensor, offset_of(vector), vector, pack(x, type));
  }

 private:
  GPU_FN static float load_one(const u8* tensor, u32 index) {
    float x[1];
    gpu::load_values(x, tensor, type, index);
    return x[0];
  }
};

// The same, element by element: tensors that begin at different places between two vectors, and doubles.
template <class Math_> struct RowElements {
  static constexpr int width = 1;
  using Math = Math_;
  static constexpr bool exact = true;
  i32 type;
  i64 begin;
  u32 keys, length, count, filled;

  GPU_FN RowElements(i32 type_, i32, i64 row, i64, i64 keys_, i64 length_)
      : type(type_), begin(row * keys_), keys((u32)keys_), length((u32)length_) {
    count = keys;
    filled = length;
  }
  GPU_FN u32 dropped(u32) const { return 0; }
  GPU_FN u32 load_mask(const u8* mask, u32 vector) const { return mask[vector] ? 1 : 0; }
  GPU_FN u32 add_mask(Math (&x)[1], const u8* mask, u32 vector) const {
    Math m[1];
    gpu::load_values(m, mask, type, vector);
    x[0] += m[0];
    return m[0] == minus_infinity(Math()) ? 1 : 0;
  }
  GPU_FN void store_bits(u8* tensor, u32 vector, u32 bits) const { tensor[begin + vector] = (u8)bits; }
  GPU_FN i64 element(u32 vector) const { return begin + vector; }
  GPU_FN void load_values(Math (&x)[1], const u8* tensor, u32 vector) const {
    gpu::load_values(x, tensor, type, begin + vector);
  }
  GPU_FN void store_values(u8* tensor, u32 vector, const Math (&x)[1]) const {
    gpu::store_values(tensor, type, begin + vector, x);
  }
};

// Keeps the compiler from making anything of x ahead of time.
GPU_FN void forget_origin([[maybe_unused]] u64& x) {
#if defined(GPU_CUDA)
  asm volatile("" : "+l"(x));
#elif defined(GPU_HIP)
  asm volatile("" : "+v"(x));
#endif
}

// ---- dropout --------------------------------------------------------------------------------------------
// Element e of a tensor has bit e % 8 of the random numbers whose counter is e / 8, so vectors begin with such eights,
// or with half of one. A row's elements that are not kept:
struct RowDropout {
  u64 key = 0;
  const u8* seed;
  u32 keep;

  template <class Arguments> GPU_FN explicit RowDropout(const Arguments& a) : seed(a.seed), keep(a.keep) {
    if (seed) key = *reinterpret_cast<const u64*>(seed);
  }
  // Bit i: whether element i of the row's vector is kept.
  template <class Row> GPU_FN u32 kept(const Row& row, u32 vector) const {
    const i64 element = row.element(vector);
    u64 again = key;  // a round's key is an addition; all of them would take registers for the whole loop
    forget_origin(again);
    const u32 eight = philox_keep_eight_finely(again, (u64)element / 8, keep);
    return Row::width == 8 ? eight : eight >> ((u32)element & 7) & ((1u << Row::width) - 1);
  }
};

// The length and the mask of a row.
struct RowPlace {
  i64 length = 0;
  const u8* mask = nullptr;

  GPU_FN RowPlace(const SoftmaxForward& a, i64 row, bool masked) : length(a.keys) {
    if (!a.causal && !masked) return;
    i64 query, head;
    const i64 group = divide(row, a.queries, &query);
    length = softmax_length(a.keys, a.queries, query, a.causal);
    if (!masked) return;
    const i64 batch = divide(group, a.heads, &head);
    mask = a.mask + batch * a.mask_batch + head * a.mask_head + query * a.mask_query;
  }
  GPU_FN RowPlace(const SoftmaxBackward& a, i64 row) : length(a.keys) {
    if (!a.causal) return;
    i64 query;
    divide(row, a.queries, &query);
    length = softmax_length(a.keys, a.queries, query, true);
  }
};

// Puts something in the place of elements of a vector, bit i of `dropped` for element i.
template <int width, class Math> GPU_FN void replace_dropped(Math (&x)[width], u32 dropped, Math by) {
  if (dropped == 0) return;
  GPU_UNROLL_FOR (int i = 0; i < width; ++i)
    if (dropped >> i & 1) x[i] = by;
}
// Likewise in words, where `by` is two halves or a float.
template <int width> GPU_FN void replace_words(Words& w, u32 dropped, u32 by) {
  if (dropped == 0) return;
  GPU_UNROLL_FOR (int k = 0; k < 4; ++k) {
    u32 out;
    if (width == 4) out = dropped >> k & 1 ? ~0u : 0u;
    else out = (dropped >> 2 * k & 1 ? 0xffffu : 0u) | (dropped >> 2 * k & 2 ? 0xffff0000u : 0u);
    w.v[k] = (w.v[k] & ~out) | (by & out);
  }
}

// Ones, for each byte of a mask that is not 0, in the place of a vector's element: two halves a word, or a float.
template <int width> GPU_FN Words ones_of_mask(const Vector<u32, width / 4>& bytes) {
  Words ones;
  GPU_UNROLL_FOR (int k = 0; k < width / 4; ++k) {
    const u32 top = ((bytes.v[k] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes.v[k];  // the highest bit of each byte
    constexpr int words = 16 / width;                                         // of a byte: four for a float's
    GPU_UNROLL_FOR (int i = 0; i < words; ++i) {
      u32& word = ones.v[k * words + i];
#if defined(GPU_CUDA)
      // Each byte of the result is a byte's sign.
      asm("prmt.b32 %0, %1, 0, %2;"
          : "=r"(word)
          : "r"(top), "r"(width == 8 ? 0x9988 + i * 0x2222 : 0x8888 + i * 0x1111));
#else
      const u32 mine = top >> (width == 8 ? 16 : 8) * i;
      if (width == 8) word = (mine >> 7 & 1) * 0xffffu | (mine >> 15 & 1) * 0xffff0000u;
      else word = 0u - (mine >> 7 & 1);
#endif
    }
  }
  return ones;
}

// Makes the compiler convert a vector again, rather than keep what it was converted to.
GPU_FN void keep_as_it_is([[maybe_unused]] Words& w) {
#if defined(GPU_CUDA)
  asm volatile("" : "+r"(w.v[0]), "+r"(w.v[1]), "+r"(w.v[2]), "+r"(w.v[3]));
#elif defined(GPU_HIP)
  asm volatile("" : "+v"(w.v[0]), "+v"(w.v[1]), "+v"(w.v[2]), "+v"(w.v[3]));
#endif
}

// A thread's vectors of a row: one of every `size` from its rank on. `fixed`: as RowTeam's.
template <int fixed> struct HeldVectors {
  u32 rank, size;
  i32 filled, count;  // vectors of the row from the thread's first on
  i64 first;          // where that begins, in bytes of the tensor

  template <class Team, class Row> GPU_FN HeldVectors(const Team& team, const Row& row)
      : rank(team.rank), size(team.size()), filled((i32)(row.filled - team.rank)), count((i32)(row.count - team.rank)),
        first(row.offset_of(team.rank)) {}
  GPU_FN i32 step(int v) const { return v * (fixed ? fixed * warp_size : (i32)size); }
  GPU_FN u32 vector(int v) const { return rank + step(v); }
  GPU_FN i64 offset(int v) const { return first + (i64)step(v) * 16; }
  GPU_FN bool keeps(int v) const { return step(v) < filled; }
  GPU_FN bool clears(int v) const { return step(v) >= filled && step(v) < count; }
};

// What dropout keeps of a thread's vectors, Row::width bits each: one register. One after another, so that the code is
// there once; meant for the time while the vectors are on their way.
template <int vectors, class Row, class Held>
GPU_FN u32 kept_of(const RowDropout& dropout, const Row& row, const Held& held) {
  static_assert(vectors * Row::width <= 32, "a register has them");
  u32 all = 0;
  GPU_ROLLED_FOR(int v = 0; v < vectors; ++v)
  if (held.keeps(v)) all |= dropout.kept(row, held.vector(v)) << v * Row::width;
  return all;
}
// Likewise, of bytes.
template <int vectors, class Row, class Held> GPU_FN u32 kept_of(const u8* bytes, const Row& row, const Held& held) {
  u32 all = 0;
  GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
    if (held.keeps(v)) all |= row.load_mask(bytes, held.vector(v)) << v * Row::width;
  return all;
}
#endif
}  // namespace gpu
