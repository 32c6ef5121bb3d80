// Softmax of rows that fit in registers: one read of what they keep, one write.
//
// Registers hold the row as it lies in memory; halves are converted, and their exponentials made, once for the sum and
// once for the result: registers are what is scarce, as they bound how many rows are on their way.
#pragma once
#include "softmax_row.h"
#include "vector_copies.h"

namespace gpu {
#if !defined(GPU_HOST)
// A thread's vector `v` of those that wait in shared memory, or are on their way there, while registers hold others. No
// thread touches what is another's, so no barrier is needed.
GPU_FN Words& waiting_vector(int v) {
  GPU_DYNAMIC_SHARED(u8, memory);
  return *reinterpret_cast<Words*>(memory + ((u32)v * block_size_x() + thread_x()) * (u32)sizeof(Words));
}
// The first `count` of a row's vectors that the thread keeps set out for the places from `first` on.
template <int vectors, class Row, class Held>
GPU_FN void fetch_vectors(int first, int count, const Row& row, const Held& held, const u8* tensor) {
  GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
    if (v >= count || !held.keeps(v)) continue;
    Words& to = waiting_vector(first + v);
    if (row.inside(held.vector(v))) copy_vector(&to, tensor + held.offset(v));
    else to = row.load(tensor, held.offset(v), held.vector(v));
  }
  end_copies();
}

// `threads`: of a block, at most. Blocks of more than softmax_threads have a row each, and the next row's first
// vectors, a.waiting of a thread, on their way while they work on it. `drops`: masks may be numbers, and dropout may
// follow.
template <i32 type, int vectors, bool aligned, bool masked, int fixed = 0, u32 threads = softmax_threads,
          bool drops = false>
GPU_FN void softmax_forward_rows(const SoftmaxForward& a) {
  using Row = RowVectors<type, aligned>;
  constexpr int width = Row::width;
  constexpr bool exact = Row::exact;
  constexpr u32 lowest = type == type_f32 ? 0xff800000u : type == type_bf16 ? 0xff80ff80u : 0xfc00fc00u;  // -inf
  constexpr bool ahead = threads > softmax_threads;
  constexpr bool whole = drops && aligned;           // nothing of a vector is past the row's end
  constexpr bool once = vectors <= (drops ? 2 : 1);  // registers have room for exponentials as floats
  using Team = RowTeam<float, fixed, threads>;
  GPU_SHARED(float, partial, 2 * Team::most_warps);
  Team team(a.lanes);
  const Exponential<float, exact> exponential(a);
  const u32 signs = drops || !a.negative ? 0u : type == type_f32 ? 0x80000000u : 0x80008000u;  // to be turned
  const bool has_mask = masked && a.mask, additive = drops && has_mask && a.additive;
  const RowDropout dropout(a);
  [[maybe_unused]] const auto fetch = [&](i64 number) {
    if (number >= a.rows) return;
    const RowPlace place(a, number, false);
    const Row row(type, a.shift, number, a.rows, a.keys, place.length);
    fetch_vectors<vectors>(0, a.waiting, row, HeldVectors<fixed>(team, row), a.input);
  };
  if constexpr (ahead) fetch(team.first);
  for (i64 first = team.first; first < a.rows; first += team.stride) {
    const i64 number = first + team.own;
    const RowPlace place(a, number < a.rows ? number : 0, has_mask);
    const Row row(type, a.shift, number, a.rows, a.keys, place.length);
    const HeldVectors<fixed> held(team, row);
    Words words[vectors];
    // The mask's bytes, as they are in memory: nothing waits for them yet. Or bits, where a vector's lie anyhow.
    constexpr bool in_words = masked && aligned;
    Vector<u32, width / 4> bytes[in_words ? vectors : 1] = {};
    u32 bits[masked && !aligned ? vectors : 1] = {};
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v) || (ahead && v < a.waiting)) continue;
      words[v] = row.load(a.input, held.offset(v), held.vector(v));
      if (!has_mask || additive) continue;
      if constexpr (in_words)
        bytes[v] = *reinterpret_cast<const Vector<u32, width / 4>*>(place.mask + held.vector(v) * width);
      else if constexpr (masked) bits[v] = row.load_mask(place.mask, held.vector(v));
    }
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)  // while the others are on their way
      if (held.clears(v)) row.store(a.output, held.offset(v), held.vector(v), Words{});
    [[maybe_unused]] u32 kept_bits = 0;
    if constexpr (drops)
      if (a.seed) kept_bits = kept_of<vectors>(dropout, row, held);
    if constexpr (ahead) {
      await_copies<0>();
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
        if (v < a.waiting && held.keeps(v)) words[v] = waiting_vector(v);
    }
    // A vector's values, with the mask's numbers.
    const auto values = [&](float (&x)[width], int v) {
      unpack(x, words[v], type);
      if constexpr (drops)
        if (additive) row.add_mask(x, place.mask, held.vector(v));
    };
    float top = masked ? minus_infinity(0.0f) : Least<float>::finite;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      GPU_UNROLL_FOR (int i = 0; i < 4; ++i) words[v].v[i] ^= signs;
      const u32 past = whole ? 0 : row.dropped(held.vector(v));
      float x[width] = {};
      bool keeps_some = true;
      if (in_words && !additive) {
        Words out = ones_of_mask<width>(bytes[in_words ? v : 0]);
        replace_words<width>(out, past, ~0u);
        GPU_UNROLL_FOR (int k = 0; k < 4; ++k) words[v].v[k] = (words[v].v[k] & ~out.v[k]) | (lowest & out.v[k]);
        keeps_some = (out.v[0] & out.v[1] & out.v[2] & out.v[3]) != ~0u;
      } else {
        u32 out = past;
        if constexpr (masked && !aligned) out |= bits[v];
        if constexpr (drops)
          if (additive) out |= row.add_mask(x, place.mask, held.vector(v));
        replace_words<width>(words[v], out, lowest);
        keeps_some = out != (1u << width) - 1;
      }
      if (masked && keeps_some) top = max_number(top, Least<float>::finite);
      values(x, v);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) top = max_number(top, x[i]);
    }
    if constexpr (ahead) fetch(first + team.stride);
    top = team.template reduce<Highest>(top, partial);
    const bool nothing = masked && top == minus_infinity(0.0f);
    if (nothing) top = 0.0f;
    float sum = 0.0f, made[once ? vectors : 1][width];
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      float x[width], some = 0.0f;
      keep_as_it_is(words[v]);
      values(x, v);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        some += x[i] = exponential(x[i], top);
        if constexpr (once) made[v][i] = x[i];
      }
      if (!once && type == type_f32) words[v] = pack(x, type);
      sum += some;
    }
    sum = team.template reduce<Total>(sum, partial);
    const float reciprocal = nothing ? 0.0f : 1.0f / sum;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      float x[width];
      if constexpr (!once) {
        keep_as_it_is(words[v]);
        if (type == type_f32) unpack(x, words[v], type);
        else values(x, v);
      }
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        if constexpr (once) x[i] = made[v][i];
        else if (type != type_f32) x[i] = exponential(x[i], top);
        x[i] = quotient<exact>(x[i], sum, reciprocal);
      }
      Words result = pack(x, type);
      const u32 outside = whole ? 0 : row.dropped(held.vector(v));
      replace_words<width>(result, outside, 0);  // in rows of nan too
      if constexpr (drops)
        if (a.seed) {
          row.store(a.softmax, held.offset(v), held.vector(v), result);
          const u32 kept = kept_bits >> v * width;
          if (a.kept) row.store_bits(a.kept, held.vector(v), kept);
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = kept >> i & 1 ? x[i] * a.kept_scale : 0.0f;
          result = pack(x, type);
          replace_words<width>(result, outside, 0);
        }
      row.store(a.output, held.offset(v), held.vector(v), result);
    }
  }
}

template <i32 type, int vectors, bool aligned, int fixed = 0, u32 threads = softmax_threads, bool drops = false>
GPU_FN void softmax_backward_rows(const SoftmaxBackward& a) {
  using Row = RowVectors<type, aligned>;
  constexpr int width = Row::width;
  using Team = RowTeam<float, fixed, threads>;
  GPU_SHARED(float, partial, 2 * Team::most_warps);
  Team team(a.lanes);
  const float scale = a.factor;
  const RowDropout dropout(a);
  for (i64 first = team.first; first < a.rows; first += team.stride) {
    const i64 number = first + team.own;
    const RowPlace place(a, number < a.rows ? number : 0);
    const Row row(type, a.shift, number, a.rows, a.keys, place.length);
    const HeldVectors<fixed> held(team, row);
    Words output[vectors], grad[vectors];
    if constexpr (vectors == 1) output[0] = grad[0] = Words{};  // a host compiler believes that one is read unset
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      output[v] = row.load(a.output, held.offset(v), held.vector(v));
      grad[v] = row.load(a.grad_output, held.offset(v), held.vector(v));
    }
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
      if (held.clears(v)) row.store(a.grad_input, held.offset(v), held.vector(v), Words{});
    [[maybe_unused]] u32 kept = ~0u;
    if constexpr (drops) {
      if (a.kept) kept = kept_of<vectors>(a.kept + number * a.keys, row, held);
      else if (a.seed) kept = kept_of<vectors>(dropout, row, held);
    }
    float sum = 0.0f;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      const u32 dropped = drops && aligned ? 0 : row.dropped(held.vector(v));
      replace_words<width>(output[v], dropped, 0);
      replace_words<width>(grad[v], drops ? dropped | ~(kept >> v * width) : dropped, 0);
      float y[width], dy[width], some = 0.0f;
      unpack(y, output[v], type);
      unpack(dy, grad[v], type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) some = fma(y[i], dy[i], some);
      sum += some;
    }
    sum = team.template reduce<Total>(sum, partial);
    const float scaled = -sum * scale;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!held.keeps(v)) continue;
      float y[width], dy[width];
      keep_as_it_is(output[v]);
      keep_as_it_is(grad[v]);
      unpack(y, output[v], type);
      unpack(dy, grad[v], type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) y[i] *= fma(dy[i], scale, scaled);
      Words result = pack(y, type);
      replace_words<width>(result, row.dropped(held.vector(v)), 0);  // in rows of nan too
      row.store(a.grad_input, held.offset(v), held.vector(v), result);
    }
  }
}
#endif
}  // namespace gpu
