// Softmax of rows of any length, which are read twice.
#pragma once
#include "softmax_row.h"

namespace gpu {
#if !defined(GPU_HOST)
template <class Row, bool drops = false> GPU_FN void softmax_forward_long(const SoftmaxForward& a) {
  using Math = typename Row::Math;
  constexpr int width = Row::width;
  const Math least = minus_infinity(Math());
  GPU_SHARED(Math, partial, 2 * RowTeam<Math>::most_warps);
  RowTeam<Math> team(-1);
  const Exponential<Math, Row::exact> exponential(a);
  const bool negated = a.negative, masked = a.mask, additive = drops && masked && a.additive;
  const RowDropout dropout(a);
  for (i64 number = team.first; number < a.rows; number += team.stride) {
    const RowPlace place(a, number, masked);
    const Row row(a.type, a.shift, number, a.rows, a.keys, place.length);
    // A vector's values, -inf in the place of those that are not kept; whether it keeps any.
    const auto load = [&](u32 vector, Math(&x)[width]) {
      u32 dropped = row.dropped(vector) | (masked && !additive ? row.load_mask(place.mask, vector) : 0);
      row.load_values(x, a.input, vector);
      if constexpr (drops)
        if (additive) dropped |= row.add_mask(x, place.mask, vector);
      if (negated)
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = -x[i];
      replace_dropped(x, dropped, least);
      return dropped != (1u << width) - 1;
    };
    Math x[width], top = least, sum = Math(0);  // of what the thread has seen, relative to its top
    for (u32 vector = team.rank; vector < row.filled; vector += team.size()) {
      if (!load(vector, x)) continue;
      const Math before = top;
      top = max_number(top, Least<Math>::finite);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) top = max_number(top, x[i]);
      if (top > before) sum *= exponential(before, top);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) sum += exponential(x[i], top);
    }
    const Math highest = team.template reduce<Highest>(top, partial);
    const bool nothing = highest == least;
    sum = top == least ? Math(0) : sum * exponential(top, highest);
    sum = team.template reduce<Total>(sum, partial);
    const Math reciprocal = nothing ? Math(0) : Math(1) / sum;
    for (u32 vector = team.rank; vector < row.count; vector += team.size()) {
      if (vector >= row.filled || nothing) {
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = Math(0);
      } else {
        load(vector, x);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i)
          x[i] = quotient<Row::exact>(exponential(x[i], highest), sum, reciprocal);
        replace_dropped(x, row.dropped(vector), Math(0));
      }
      if constexpr (drops)
        if (a.seed) {
          row.store_values(a.softmax, vector, x);
          const u32 kept = dropout.kept(row, vector);
          if (a.kept) row.store_bits(a.kept, vector, kept);
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] *= (Math)a.kept_by;
          replace_dropped(x, ~kept, Math(0));
        }
      row.store_values(a.output, vector, x);
    }
  }
}

template <class Row, bool drops = false> GPU_FN void softmax_backward_long(const SoftmaxBackward& a) {
  using Math = typename Row::Math;
  constexpr int width = Row::width;
  GPU_SHARED(Math, partial, 2 * RowTeam<Math>::most_warps);
  RowTeam<Math> team(-1);
  const Math scale = (Math)a.scale;
  const RowDropout dropout(a);
  for (i64 number = team.first; number < a.rows; number += team.stride) {
    const RowPlace place(a, number);
    const Row row(a.type, a.shift, number, a.rows, a.keys, place.length);
    Math y[width], dy[width], sum = Math(0);
    const auto load = [&](u32 vector) {
      u32 kept = ~0u;
      if constexpr (drops) {
        if (a.kept) kept = row.load_mask(a.kept + number * a.keys, vector);
        else if (a.seed) kept = dropout.kept(row, vector);
      }
      row.load_values(y, a.output, vector);
      row.load_values(dy, a.grad_output, vector);
      replace_dropped(y, row.dropped(vector), Math(0));
      replace_dropped(dy, row.dropped(vector) | ~kept, Math(0));
    };
    for (u32 vector = team.rank; vector < row.filled; vector += team.size()) {
      load(vector);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) sum = fma(y[i], dy[i], sum);
    }
    const Math scaled = -team.template reduce<Total>(sum, partial) * scale;
    for (u32 vector = team.rank; vector < row.count; vector += team.size()) {
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) y[i] = Math(0);
      if (vector < row.filled) {
        load(vector);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) y[i] *= fma(dy[i], scale, scaled);
        replace_dropped(y, row.dropped(vector), Math(0));
      }
      row.store_values(a.grad_input, vector, y);
    }
  }
}
#endif
}  // namespace gpu
