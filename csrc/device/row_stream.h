// Rows of a matrix for kernels that hold a row in registers: who works on which part of it, its memory on its way
// while the row before is worked on, and sums over it.
//
// A row is a warp's or a block's (its team). A warp's part of it is `vectors` stretches of one vector a lane each, side
// by side, so that one address and constants reach all of them. Vectors past the row's end are zeros.
#pragma once
#include "reduce.h"
#include "vectors.h"

// Where copies to shared memory run beside the threads (and in the tests' executor), rows wait there, several deep, and
// weights stay there. AMD's registers hold both, and other waves work while one waits for its row.
#if defined(GPU_HIP)
#define GPU_STAGED 0
#else
#define GPU_STAGED 1
#endif

namespace gpu {
#if !defined(GPU_HOST)
constexpr u32 vector_bytes = 16;  // of shared memory, whatever the element type
constexpr u32 stretch_bytes = warp_size * vector_bytes;

struct RowTeam {
  static constexpr int most_warps = 512 / warp_size;
  static constexpr int quads = 2 * 2 * most_warps / 4;  // two turns of two sums
  bool is_warp, leads;                                  // leads: one thread of the team
  u32 warp;                                             // of the team: 0 where it is one warp
  u32 warp_of_block;
  u32 first, stride;  // rows
  Vector<float, 4>* partial;
  u32 turn = 0;

  // `partial_`: RowTeam::quads of shared memory. Ends with a barrier.
  GPU_FN RowTeam(bool warp_rows, Vector<float, 4>* partial_)
      : is_warp(warp_rows), warp_of_block(warp_uniform(thread_x() / warp_size)), partial(partial_) {
    const u32 warps = block_size_x() / warp_size;
    warp = is_warp ? 0 : warp_of_block;
    leads = warp == 0 && lane_id() == 0;
    first = is_warp ? block_x() * warps + warp_of_block : block_x();
    stride = is_warp ? grid_x() * warps : grid_x();
    // Warps that are not there contribute 0.
    GPU_ROLLED_FOR(u32 i = thread_x(); i < quads; i += block_size_x()) partial[i] = {};
    sync_threads();
  }
  GPU_FN u32 turns(i64 rows) const { return first < rows ? (u32)((rows - first + stride - 1) / stride) : 0; }

  // Every thread gets the sums over the team. One barrier: two halves take turns, and a warp that comes back to one
  // has met all others at the barrier between.
  template <int N> GPU_FN void sum(float (&x)[N]) {
    static_assert(N <= 2, "there is room for two");
    // Of two sums, each half of the warp makes one: fewer exchanges.
    const u32 which = N == 2 ? lane_id() / (warp_size / 2) : 0;
    float mine = x[0];
    if constexpr (N == 2) mine = (which ? x[1] : x[0]) + shuffle_xor_value(which ? x[0] : x[1], warp_size / 2);
    GPU_UNROLL_FOR (int mask = warp_size / (N == 2 ? 4 : 2); mask; mask /= 2) mine += shuffle_xor_value(mine, mask);
    if (is_warp) {
      const float other = N == 2 ? shuffle_xor_value(mine, warp_size / 2) : 0.0f;
      x[0] = which ? other : mine;
      if constexpr (N == 2) x[1] = which ? mine : other;
      return;
    }
    Vector<float, 4>* const all = partial + turn;
    turn ^= quads / 2;
    if (lane_id() % (warp_size / N) == 0) reinterpret_cast<float*>(all)[which * most_warps + warp] = mine;
    sync_threads();
    constexpr int half = most_warps / 8;  // quads
    GPU_UNROLL_FOR (int n = 0; n < N; ++n) x[n] = add_quads<half>(all + n * 2 * half);
    if (block_size_x() > most_warps / 2 * warp_size)
      GPU_UNROLL_FOR (int n = 0; n < N; ++n) x[n] += add_quads<half>(all + n * 2 * half + half);
  }

  // Mean and sum of squared deviations of the team's values, from those of `count` values of each thread: Chan, Golub
  // and LeVeque's way of merging, which loses no digits where the mean is large. One barrier.
  GPU_FN void merge(float& mean, float& squares, float count) {
    GPU_UNROLL_FOR (int mask = 1; mask < warp_size; mask *= 2) {
      const float other = shuffle_xor_value(mean, mask), difference = other - mean;
      squares += shuffle_xor_value(squares, mask);
      mean = 0.5f * (mean + other);
      squares = fma(difference * difference, 0.5f * count, squares);
      count *= 2.0f;
    }
    if (is_warp) return;
    float* const means = reinterpret_cast<float*>(partial + turn);
    turn ^= quads / 2;
    if (lane_id() == 0) {
      means[warp] = mean;
      means[most_warps + warp] = squares;
    }
    sync_threads();
    const u32 warps = block_size_x() / warp_size;
    const Vector<float, 4>* const all = reinterpret_cast<const Vector<float, 4>*>(means);
    constexpr int half = most_warps / 8;
    const bool many = warps > most_warps / 2;
    mean = add_quads<half>(all);
    squares = add_quads<half>(all + 2 * half);
    if (many) {
      mean += add_quads<half>(all + half);
      squares += add_quads<half>(all + 3 * half);
    }
    mean *= 1.0f / (float)warps;
    float between = 0.0f;
    const auto add_between = [&](int first) {
      GPU_UNROLL_FOR (int q = 0; q < half; ++q) {
        const Vector<float, 4> four = all[first / 4 + q];
        GPU_UNROLL_FOR (int n = 0; n < 4; ++n) {
          const float difference = (u32)(first + q * 4 + n) < warps ? four.v[n] - mean : 0.0f;
          between = fma(difference, difference, between);
        }
      }
    };
    add_between(0);
    if (many) add_between(most_warps / 2);
    squares = fma(between, count, squares);
  }

 private:
  template <int count> GPU_FN static float add_quads(const Vector<float, 4>* p) {
    Vector<float, 4> four = p[0];
    GPU_UNROLL_FOR (int i = 1; i < count; ++i) {
      const Vector<float, 4> more = p[i];
      GPU_UNROLL_FOR (int n = 0; n < 4; ++n) four.v[n] += more.v[n];
    }
    return (four.v[0] + four.v[1]) + (four.v[2] + four.v[3]);
  }
};

// What a thread has of a row: elements [offset(v), offset(v) + width) for each v with has(v).
template <int width, int vectors> struct RowPart {
  u32 row_size, begin;
  bool there[vectors];
  GPU_FN RowPart(const RowTeam& team, i64 hidden)
      : row_size((u32)hidden), begin((team.warp * vectors * warp_size + lane_id()) * width) {
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) there[v] = begin + v * warp_size * width < row_size;
  }
  GPU_FN bool has(int v) const { return there[v]; }
  GPU_FN i64 of_row(i64 row) const { return row * row_size + begin; }
  GPU_FN static constexpr i32 offset(int v) { return v * warp_size * width; }  // from `begin`
};

// A tensor that a RowStream reads. The last one may be null: not there.
struct RowTensor {
  const u8* memory;
  i32 type;
};

// The rows of a team, depth() of them on their way. What next() brought is read as often as wanted.
template <int width, int vectors, int tensors> struct RowStream {
  RowTensor from[tensors];
  const RowPart<width, vectors>& part;

#if GPU_STAGED
  u8* mine;  // the thread's slots: no other thread touches them, so no barrier is needed
  u32 stages, stage_bytes, all_bytes, at_read;
  bool has_last;

  GPU_FN RowStream(const RowTensor (&from_)[tensors], const RowTeam& team, const RowPart<width, vectors>& part_,
                   u8* shared, i32 stages_)
      : part(part_), stages(stages_) {
    GPU_UNROLL_FOR (int t = 0; t < tensors; ++t) from[t] = from_[t];
    has_last = from[tensors - 1].memory != nullptr;
    stage_bytes = (tensors - !has_last) * (vectors * stretch_bytes);
    all_bytes = stages * stage_bytes;
    mine = pinned_shared(shared + team.warp_of_block * all_bytes + lane_id() * vector_bytes);
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
      if (!part.has(v)) GPU_ROLLED_FOR(u32 at = v * stretch_bytes; at < all_bytes; at += vectors * stretch_bytes)
    *reinterpret_cast<Words*>(mine + at) = Words{};
    at_read = all_bytes - stage_bytes;
  }
  static constexpr u32 most_stages = 3;
  GPU_FN u32 depth() const { return stages - 1; }
  // The first depth() rows, before any next(): row `turn` of the team. `at`: the element of the tensors at which the
  // thread's part of the row begins.
  GPU_FN void start(u32 turn, bool there, i64 at) { fetch(turn * stage_bytes, there, at); }
  // The row that was read gives way to the one depth() turns ahead, if there is one; the next one is read from now on.
  GPU_FN void next(bool there, i64 at) {
    fetch(at_read, there, at);
    if (stages == most_stages) copy_async_wait<most_stages - 1>();
    else if (stages == 2) copy_async_wait<1>();
    else copy_async_wait<0>();
    at_read = at_read + stage_bytes == all_bytes ? 0 : at_read + stage_bytes;
  }
  GPU_FN Words read(int t, int v) const {
    return load_words<width>(mine + at_read + (t * vectors + v) * stretch_bytes, from[t].type);
  }

 private:
  GPU_FN void fetch(u32 stage, bool there, i64 at) {
    if (there) {
      GPU_UNROLL_FOR (int t = 0; t < tensors; ++t) {
        if (t == tensors - 1 && !has_last) continue;
        const u8* const row = from[t].memory + at * bytes_of(from[t].type);
        GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
          u8* const to = mine + stage + (t * vectors + v) * stretch_bytes;
          if (!part.has(v)) continue;
          if (width == 8 || from[t].type == type_f32) copy_async<16>(to, row + part.offset(v) * (width == 8 ? 2 : 4));
          else copy_async<8>(to, row + part.offset(v) * 2);
        }
      }
    }
    copy_async_commit();
  }
#else
  Words now[tensors - 1][vectors];
  i64 at_read;

  GPU_FN RowStream(const RowTensor (&from_)[tensors], const RowTeam&, const RowPart<width, vectors>& part_, u8*, i32)
      : part(part_) {
    GPU_UNROLL_FOR (int t = 0; t < tensors; ++t) from[t] = from_[t];
  }
  GPU_FN u32 depth() const { return 0; }
  GPU_FN void start(u32, bool, i64) {}
  GPU_FN void next(bool, i64 at) {
    at_read = at;
    GPU_UNROLL_FOR (int t = 0; t < tensors - 1; ++t)
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) now[t][v] = load(t, v);
  }
  GPU_FN Words read(int t, int v) const { return t == tensors - 1 ? load(t, v) : now[t][v]; }

 private:
  GPU_FN Words load(int t, int v) const {
    return part.has(v)
               ? load_words<width>(from[t].memory + (at_read + part.offset(v)) * bytes_of(from[t].type), from[t].type)
               : Words{};
  }
#endif
};

// Four floats of every thread of a team in shared memory: a warp's lanes lie side by side, so all banks serve it.
template <int width, int vectors> struct QuadLayout {
  static constexpr u32 quads = width / 4;
  // Quad `q` of vector `v` of this thread.
  GPU_FN static u32 at(const RowTeam& team, int v, int q) {
    return (((team.warp * vectors + v) * quads) + q) * warp_size + lane_id();
  }
  // The first column of quad `i`.
  GPU_FN static u32 column(u32 i) {
    const u32 lane = i % warp_size, stretch = i / warp_size;
    return (stretch / quads * warp_size + lane) * width + stretch % quads * 4;
  }
};

// A tensor of one row's length, as floats, for every row.
template <int width, int vectors> struct RowConstants {
  using Layout = QuadLayout<width, vectors>;
#if GPU_STAGED
  const Vector<float, 4>* mine;

  // `shared`: where fill_constants puts the tensor.
  GPU_FN RowConstants(const u8*, i32, float, const RowTeam& team, const RowPart<width, vectors>&,
                      const Vector<float, 4>* shared)
      : mine(pinned_shared(shared + Layout::at(team, 0, 0))) {}
  GPU_FN void read(float (&x)[width], int v) const {
    GPU_UNROLL_FOR (u32 q = 0; q < Layout::quads; ++q) {
      const Vector<float, 4> four = mine[(v * Layout::quads + q) * warp_size];
      GPU_UNROLL_FOR (int i = 0; i < 4; ++i) x[q * 4 + i] = four.v[i];
    }
  }
#else
  // Many would leave no registers; those are read, from a cache, at every use.
  static constexpr bool keeps = width * vectors <= 24;
  const u8* from;
  i32 type;
  float otherwise;
  const RowPart<width, vectors>& part;
  float kept[keeps ? vectors : 1][width];

  GPU_FN RowConstants(const u8* from_, i32 type_, float otherwise_, const RowTeam&,
                      const RowPart<width, vectors>& part_, const Vector<float, 4>*)
      : from(from_), type(type_), otherwise(otherwise_), part(part_) {
    if constexpr (keeps)
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) load(kept[v], v);
  }
  GPU_FN void read(float (&x)[width], int v) const {
    if constexpr (keeps)
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = kept[v][i];
    else load(x, v);
  }

 private:
  GPU_FN void load(float (&x)[width], int v) const {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = otherwise;
    if (from && part.has(v)) load_values(x, from, type, part.begin + part.offset(v));
  }
#endif
};

// Puts tensors of one row's length where RowConstants reads them, `count` quads each; a null one's are `otherwise`. A
// quad of all of them is on its way at once. A barrier must follow before they are read.
template <int width, int vectors, int tensors>
GPU_FN void fill_constants([[maybe_unused]] const u8* const (&from)[tensors],
                           [[maybe_unused]] const float (&otherwise)[tensors], [[maybe_unused]] i32 type,
                           [[maybe_unused]] i64 hidden, [[maybe_unused]] Vector<float, 4>* shared,
                           [[maybe_unused]] u32 count) {
#if GPU_STAGED
  GPU_ROLLED_FOR(u32 i = thread_x(); i < count; i += block_size_x()) {
    const u32 column = QuadLayout<width, vectors>::column(i);
    const bool there = column < hidden;
    Words words[tensors] = {};
    GPU_UNROLL_FOR (int t = 0; t < tensors; ++t)
      if (there && from[t]) words[t] = load_words<4>(from[t] + column * bytes_of(type), type);
    GPU_UNROLL_FOR (int t = 0; t < tensors; ++t) {
      float x[4] = {otherwise[t], otherwise[t], otherwise[t], otherwise[t]};
      if (there && from[t]) unpack(x, words[t], type);
      shared[t * count + i] = {{x[0], x[1], x[2], x[3]}};
    }
  }
#endif
}
#endif
}  // namespace gpu
