// Rows whose vectors fit in the registers of some lanes of a warp, of a warp or of a block take the `rows` kernels: one
// read of what they keep, one write. Longer rows take the `long` kernels, which read a row twice. What lies past the
// diagonal is written and never read. The order of every sum is fixed.
//
// Memory is read and written 16 bytes at a time, whatever the rows' length: a row begins within its first vector and
// ends within its last, and only there are elements written one by one.
#include "exponential.h"
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
// `fixed`: so many whole warps, known when compiled: one of a block's, or the two of a block.
template <class Math, int fixed = 0> struct RowTeam {
  static constexpr u32 most_warps = softmax_threads / warp_size;
  u32 rank, lanes;
  u32 warps, wide;  // of the block, and as a power of two; for blocks that share a row
  u32 turn = 0;     // reductions so far
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

  GPU_FN RowVectors(i32, i32 tensor_shift, i64 row, i64 rows, i64 keys_, i64 length_) : elements(rows * keys_), keys((u32)keys_), length((u32)length_) {
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
  // The thread's vector at so many bytes from the tensor's begin, which is the row's number `vector`.
  GPU_FN Words load(const u8* tensor, i64 offset, u32 vector) const {
    if constexpr (aligned) return *reinterpret_cast<const Words*>(tensor + offset);
    const i64 at = begin + (i64)vector * width;
    if (at >= 0 && at + width <= elements) return *reinterpret_cast<const Words*>(tensor + offset);
    Words w{};  // the tensor's own edge; elements of other rows are of no account
    GPU_UNROLL for (int i = 0; i < width; ++i) {
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
      GPU_UNROLL for (int i = 0; i < width; ++i) {
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
      GPU_UNROLL for (int i = 0; i < width; ++i) masked |= (w.v[i / 4] >> i % 4 * 8 & 0xffu ? 1u : 0u) << i;
    } else {
      const u32 outside = dropped(vector);
      GPU_UNROLL for (int i = 0; i < width; ++i)
        if (!(outside >> i & 1)) masked |= (mask[vector * width + i - shift] ? 1u : 0u) << i;
    }
    return masked;
  }
  GPU_FN i64 offset_of(u32 vector) const { return begin * bytes + (i64)vector * 16; }
  GPU_FN void load_values(float (&x)[width], const u8* tensor, u32 vector) const {
    unpack(x, load(tensor, offset_of(vector), vector), type);
  }
  GPU_FN void store_values(u8* tensor, u32 vector, const float (&x)[width]) const {
    store(tensor, offset_of(vector), vector, pack(x, type));
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

  GPU_FN RowElements(i32 type_, i32, i64 row, i64, i64 keys_, i64 length_) : type(type_), begin(row * keys_), keys((u32)keys_), length((u32)length_) {
    count = keys;
    filled = length;
  }
  GPU_FN u32 dropped(u32) const { return 0; }
  GPU_FN u32 load_mask(const u8* mask, u32 vector) const { return mask[vector] ? 1 : 0; }
  GPU_FN void load_values(Math (&x)[1], const u8* tensor, u32 vector) const { gpu::load_values(x, tensor, type, begin + vector); }
  GPU_FN void store_values(u8* tensor, u32 vector, const Math (&x)[1]) const { gpu::store_values(tensor, type, begin + vector, x); }
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
  GPU_UNROLL for (int i = 0; i < width; ++i)
    if (dropped >> i & 1) x[i] = by;
}
// Likewise in words, where `by` is two halves or a float.
template <int width> GPU_FN void replace_words(Words& w, u32 dropped, u32 by) {
  if (dropped == 0) return;
  GPU_UNROLL for (int k = 0; k < 4; ++k) {
    u32 out;
    if (width == 4) out = dropped >> k & 1 ? ~0u : 0u;
    else out = (dropped >> 2 * k & 1 ? 0xffffu : 0u) | (dropped >> 2 * k & 2 ? 0xffff0000u : 0u);
    w.v[k] = (w.v[k] & ~out) | (by & out);
  }
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
      : rank(team.rank), size(team.size()), filled((i32)(row.filled - team.rank)), count((i32)(row.count - team.rank)), first(row.offset_of(team.rank)) {}
  GPU_FN i32 step(int v) const { return v * (fixed ? fixed * warp_size : (i32)size); }
  GPU_FN u32 vector(int v) const { return rank + step(v); }
  GPU_FN i64 offset(int v) const { return first + (i64)step(v) * 16; }
  GPU_FN bool keeps(int v) const { return step(v) < filled; }
  GPU_FN bool clears(int v) const { return step(v) >= filled && step(v) < count; }
};

// ---- rows in registers ------------------------------------------------------------------------------------
// Registers hold the row as it lies in memory; halves are converted, and their exponentials made, once for the sum and
// once for the result: registers are what is scarce, as they bound how many rows are on their way.
template <i32 type, int vectors, bool aligned, bool masked, int fixed = 0> GPU_FN void softmax_forward_rows(const SoftmaxForward& a) {
  using Row = RowVectors<type, aligned>;
  constexpr int width = Row::width;
  constexpr bool exact = Row::exact;
  constexpr u32 lowest = type == type_f32 ? 0xff800000u : type == type_bf16 ? 0xff80ff80u : 0xfc00fc00u;  // -inf
  GPU_SHARED(float, partial, 2 * RowTeam<float>::most_warps);
  RowTeam<float, fixed> team(a.lanes);
  const Exponential<float, exact> exponential(a);
  const u32 signs = !a.negative ? 0u : type == type_f32 ? 0x80000000u : 0x80008000u;  // to be turned
  const bool has_mask = masked && a.mask;
  for (i64 first = team.first; first < a.rows; first += team.stride) {
    const i64 number = first + team.own;
    const RowPlace place(a, number < a.rows ? number : 0, has_mask);
    const Row row(type, a.shift, number, a.rows, a.keys, place.length);
    const HeldVectors<fixed> held(team, row);
    Words words[vectors];
    u32 dropped[masked ? vectors : 1] = {};
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      words[v] = row.load(a.input, held.offset(v), held.vector(v));
      if constexpr (masked) dropped[v] = has_mask ? row.load_mask(place.mask, held.vector(v)) : 0;
    }
    GPU_UNROLL for (int v = 0; v < vectors; ++v)  // while the others are on their way
      if (held.clears(v)) row.store(a.output, held.offset(v), held.vector(v), Words{});
    float top = masked ? minus_infinity(0.0f) : Least<float>::finite;
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      GPU_UNROLL for (int i = 0; i < 4; ++i) words[v].v[i] ^= signs;
      u32 out = row.dropped(held.vector(v));
      if constexpr (masked) out |= dropped[v];
      replace_words<width>(words[v], out, lowest);
      if (masked && out != (1u << width) - 1) top = max_number(top, Least<float>::finite);
      float x[width];
      unpack(x, words[v], type);
      GPU_UNROLL for (int i = 0; i < width; ++i) top = max_number(top, x[i]);
    }
    top = team.template reduce<Highest>(top, partial);
    const bool nothing = masked && top == minus_infinity(0.0f);
    if (nothing) top = 0.0f;
    float sum = 0.0f;
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      float x[width], some = 0.0f;
      keep_as_it_is(words[v]);
      unpack(x, words[v], type);
      GPU_UNROLL for (int i = 0; i < width; ++i) some += x[i] = exponential(x[i], top);
      if (type == type_f32) words[v] = pack(x, type);
      sum += some;
    }
    sum = team.template reduce<Total>(sum, partial);
    const float reciprocal = nothing ? 0.0f : 1.0f / sum;
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      float x[width];
      keep_as_it_is(words[v]);
      unpack(x, words[v], type);
      GPU_UNROLL for (int i = 0; i < width; ++i)
        x[i] = quotient<exact>(type == type_f32 ? x[i] : exponential(x[i], top), sum, reciprocal);
      Words result = pack(x, type);
      replace_words<width>(result, row.dropped(held.vector(v)), 0);  // in rows of nan too
      row.store(a.output, held.offset(v), held.vector(v), result);
    }
  }
}

template <i32 type, int vectors, bool aligned, int fixed = 0> GPU_FN void softmax_backward_rows(const SoftmaxBackward& a) {
  using Row = RowVectors<type, aligned>;
  constexpr int width = Row::width;
  GPU_SHARED(float, partial, 2 * RowTeam<float>::most_warps);
  RowTeam<float, fixed> team(a.lanes);
  const float scale = a.factor;
  for (i64 first = team.first; first < a.rows; first += team.stride) {
    const i64 number = first + team.own;
    const RowPlace place(a, number < a.rows ? number : 0);
    const Row row(type, a.shift, number, a.rows, a.keys, place.length);
    const HeldVectors<fixed> held(team, row);
    Words output[vectors], grad[vectors];
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      output[v] = row.load(a.output, held.offset(v), held.vector(v));
      grad[v] = row.load(a.grad_output, held.offset(v), held.vector(v));
    }
    GPU_UNROLL for (int v = 0; v < vectors; ++v)
      if (held.clears(v)) row.store(a.grad_input, held.offset(v), held.vector(v), Words{});
    float sum = 0.0f;
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      const u32 dropped = row.dropped(held.vector(v));
      replace_words<width>(output[v], dropped, 0);
      replace_words<width>(grad[v], dropped, 0);
      float y[width], dy[width], some = 0.0f;
      unpack(y, output[v], type);
      unpack(dy, grad[v], type);
      GPU_UNROLL for (int i = 0; i < width; ++i) some = fma(y[i], dy[i], some);
      sum += some;
    }
    sum = team.template reduce<Total>(sum, partial);
    const float scaled = -sum * scale;
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      float y[width], dy[width];
      keep_as_it_is(output[v]);
      keep_as_it_is(grad[v]);
      unpack(y, output[v], type);
      unpack(dy, grad[v], type);
      GPU_UNROLL for (int i = 0; i < width; ++i) y[i] *= fma(dy[i], scale, scaled);
      Words result = pack(y, type);
      replace_words<width>(result, row.dropped(held.vector(v)), 0);  // in rows of nan too
      row.store(a.grad_input, held.offset(v), held.vector(v), result);
    }
  }
}

// ---- rows of any length -------------------------------------------------------------------------------------
template <class Row> GPU_FN void softmax_forward_long(const SoftmaxForward& a) {
  using Math = typename Row::Math;
  constexpr int width = Row::width;
  const Math least = minus_infinity(Math());
  GPU_SHARED(Math, partial, 2 * RowTeam<Math>::most_warps);
  RowTeam<Math> team(-1);
  const Exponential<Math, Row::exact> exponential(a);
  const bool negated = a.negative, masked = a.mask;
  for (i64 number = team.first; number < a.rows; number += team.stride) {
    const RowPlace place(a, number, masked);
    const Row row(a.type, a.shift, number, a.rows, a.keys, place.length);
    // A vector's values, -inf in the place of those that are not kept; whether it keeps any.
    const auto load = [&](u32 vector, Math(&x)[width]) {
      const u32 dropped = row.dropped(vector) | (masked ? row.load_mask(place.mask, vector) : 0);
      row.load_values(x, a.input, vector);
      if (negated) GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = -x[i];
      replace_dropped(x, dropped, least);
      return dropped != (1u << width) - 1;
    };
    Math x[width], top = least, sum = Math(0);  // of what the thread has seen, relative to its top
    for (u32 vector = team.rank; vector < row.filled; vector += team.size()) {
      if (!load(vector, x)) continue;
      const Math before = top;
      top = max_number(top, Least<Math>::finite);
      GPU_UNROLL for (int i = 0; i < width; ++i) top = max_number(top, x[i]);
      if (top > before) sum *= exponential(before, top);
      GPU_UNROLL for (int i = 0; i < width; ++i) sum += exponential(x[i], top);
    }
    const Math highest = team.template reduce<Highest>(top, partial);
    const bool nothing = highest == least;
    sum = top == least ? Math(0) : sum * exponential(top, highest);
    sum = team.template reduce<Total>(sum, partial);
    const Math reciprocal = nothing ? Math(0) : Math(1) / sum;
    for (u32 vector = team.rank; vector < row.count; vector += team.size()) {
      if (vector >= row.filled || nothing) {
        GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = Math(0);
      } else {
        load(vector, x);
        GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = quotient<Row::exact>(exponential(x[i], highest), sum, reciprocal);
        replace_dropped(x, row.dropped(vector), Math(0));
      }
      row.store_values(a.output, vector, x);
    }
  }
}

template <class Row> GPU_FN void softmax_backward_long(const SoftmaxBackward& a) {
  using Math = typename Row::Math;
  constexpr int width = Row::width;
  GPU_SHARED(Math, partial, 2 * RowTeam<Math>::most_warps);
  RowTeam<Math> team(-1);
  const Math scale = (Math)a.scale;
  for (i64 number = team.first; number < a.rows; number += team.stride) {
    const RowPlace place(a, number);
    const Row row(a.type, a.shift, number, a.rows, a.keys, place.length);
    Math y[width], dy[width], sum = Math(0);
    for (u32 vector = team.rank; vector < row.filled; vector += team.size()) {
      row.load_values(y, a.output, vector);
      row.load_values(dy, a.grad_output, vector);
      replace_dropped(y, row.dropped(vector), Math(0));
      replace_dropped(dy, row.dropped(vector), Math(0));
      GPU_UNROLL for (int i = 0; i < width; ++i) sum = fma(y[i], dy[i], sum);
    }
    const Math scaled = -team.template reduce<Total>(sum, partial) * scale;
    for (u32 vector = team.rank; vector < row.count; vector += team.size()) {
      GPU_UNROLL for (int i = 0; i < width; ++i) y[i] = Math(0);
      if (vector < row.filled) {
        row.load_values(y, a.output, vector);
        row.load_values(dy, a.grad_output, vector);
        GPU_UNROLL for (int i = 0; i < width; ++i) y[i] *= fma(dy[i], scale, scaled);
        replace_dropped(y, row.dropped(vector), Math(0));
      }
      row.store_values(a.grad_input, vector, y);
    }
  }
}
#endif
}  // namespace gpu

#define SOFTMAX_KERNEL(name, Arguments, bounds, ...)                                                              \
  extern "C" GPU_KERNEL bounds void scaled_masked_softmax_##name(gpu::Arguments arguments) {  \
    gpu::await_previous_kernel();                                                                                 \
    __VA_ARGS__(arguments);                                                                                       \
  }                                                                                                               \
  GPU_REGISTER(scaled_masked_softmax_##name)
#define SOFTMAX_FORWARD(name, bounds, ...) SOFTMAX_KERNEL(forward_##name, SoftmaxForward, bounds, gpu::softmax_forward_##__VA_ARGS__)
#define SOFTMAX_BACKWARD(name, bounds, ...) SOFTMAX_KERNEL(backward_##name, SoftmaxBackward, bounds, gpu::softmax_backward_##__VA_ARGS__)
// Threads a block, and how many such blocks must fit in a multiprocessor's registers.
#define ANY_BLOCK (gpu::softmax_threads, 1)
#define FIXED_FORWARD (gpu::softmax_fixed_threads, 8)
#define FIXED_BACKWARD (gpu::softmax_fixed_threads, 5)

// By element type and vectors a thread. `odd`: rows that do not begin and end with a vector, with a mask or without.
#define ROWS(name, type, vectors)                                                        \
  SOFTMAX_FORWARD(name##x##vectors, ANY_BLOCK, rows<type, vectors, true, false>)         \
  SOFTMAX_FORWARD(masked_##name##x##vectors, ANY_BLOCK, rows<type, vectors, true, true>) \
  SOFTMAX_FORWARD(odd_##name##x##vectors, ANY_BLOCK, rows<type, vectors, false, true>)   \
  SOFTMAX_BACKWARD(name##x##vectors, ANY_BLOCK, rows<type, vectors, true>)               \
  SOFTMAX_BACKWARD(odd_##name##x##vectors, ANY_BLOCK, rows<type, vectors, false>)
// Aligned, of one or two warps a row: what is known when compiled saves instructions and registers.
#define FIXED(name, type, vectors, warps)                                             \
  SOFTMAX_FORWARD(name, FIXED_FORWARD, rows<type, vectors, true, false, warps>)       \
  SOFTMAX_BACKWARD(name, FIXED_BACKWARD, rows<type, vectors, true, warps>)
#define LONG(name, ...)                                    \
  SOFTMAX_FORWARD(long_##name, ANY_BLOCK, long<__VA_ARGS__>) \
  SOFTMAX_BACKWARD(long_##name, ANY_BLOCK, long<__VA_ARGS__>)
#define TYPE(name, type)                                                      \
  ROWS(name, type, 1)                                                         \
  ROWS(name, type, 4)                                                         \
  FIXED(name##x8, type, 8, 1)                                                 \
  FIXED(name##x8w2, type, 8, 2)                                               \
  LONG(name, gpu::RowVectors<type, false>)
TYPE(bf16, gpu::type_bf16)
TYPE(f16, gpu::type_f16)
TYPE(f32, gpu::type_f32)
LONG(any, gpu::RowElements<float>)
LONG(f64, gpu::RowElements<double>)
