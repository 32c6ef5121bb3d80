// The backward of softmax over rows that fill a multiprocessor: a block of the largest size has one.
#pragma once
#include "softmax_long.h"
#include "softmax_registers.h"

namespace gpu {
#if !defined(GPU_HOST)
#if defined(GPU_HIP)
// Registers hold both tensors, of halves.
template <i32 type, int vectors> GPU_FN void softmax_backward_held(const SoftmaxBackward& a) {
  if constexpr (type == type_f32) softmax_backward_long<RowVectors<type, false>>(a);  // never asked for
  else softmax_backward_rows<type, vectors, true, softmax_held_warps, softmax_held_threads>(a);
}
#elif defined(GPU_CUDA) && __CUDA_ARCH__ < 800
// Shared memory has no room: never asked for.
template <i32 type, int vectors> GPU_FN void softmax_backward_held(const SoftmaxBackward& a) {
  softmax_backward_long<RowVectors<type, false>>(a);
}
#else
// Registers hold the gradient, and shared memory the output. Of the next row what has room is on its way meanwhile:
// a.waiting vectors of the gradient, then the output.
template <i32 type, int vectors> GPU_FN void softmax_backward_held(const SoftmaxBackward& a) {
  using Row = RowVectors<type, true>;
  constexpr int width = Row::width;
  using Team = RowTeam<float, softmax_held_warps, softmax_held_threads>;
  GPU_SHARED(float, partial, 2 * Team::most_warps);
  Team team(-1);
  const float scale = a.factor;
  const auto with_row = [&](i64 number, const auto& work) {
    if (number >= a.rows) return;
    const RowPlace place(a, number);
    const Row row(type, a.shift, number, a.rows, a.keys, place.length);
    work(row, HeldVectors<softmax_held_warps>(team, row));
  };
  const auto fetch_grad = [&](const auto& row, const auto& held) {
    fetch_vectors<vectors>(vectors, a.waiting, row, held, a.grad_output);
  };
  const auto fetch_output = [&](const auto& row, const auto& held) {
    fetch_vectors<vectors>(0, vectors, row, held, a.output);
  };
  with_row(team.first, fetch_output);
  with_row(team.first, fetch_grad);
  for (i64 number = team.first; number < a.rows; number += team.stride) {
    with_row(number, [&](const auto& row, const auto& held) {
      Words grad[vectors];
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
        if (v >= a.waiting && held.keeps(v)) grad[v] = row.load(a.grad_output, held.offset(v), held.vector(v));
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
        if (held.clears(v)) row.store(a.grad_input, held.offset(v), held.vector(v), Words{});
      await_copies<0>();
      float sum = 0.0f;
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
        if (!held.keeps(v)) continue;
        if (v < a.waiting) grad[v] = waiting_vector(vectors + v);
        const u32 dropped = row.dropped(held.vector(v));
        Words output = waiting_vector(v);
        replace_words<width>(output, dropped, 0);
        replace_words<width>(grad[v], dropped, 0);
        float y[width], dy[width], some = 0.0f;
        unpack(y, output, type);
        unpack(dy, grad[v], type);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) some = fma(y[i], dy[i], some);
        sum += some;
      }
      with_row(number + team.stride, fetch_grad);
      sum = team.template reduce<Total>(sum, partial);
      const float scaled = -sum * scale;
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
        if (!held.keeps(v)) continue;
        float y[width], dy[width];
        unpack(y, waiting_vector(v), type);
        unpack(dy, grad[v], type);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) y[i] *= fma(dy[i], scale, scaled);
        Words result = pack(y, type);
        replace_words<width>(result, row.dropped(held.vector(v)), 0);  // in rows of nan too
        row.store(a.grad_input, held.offset(v), held.vector(v), result);
      }
    });
    with_row(number + team.stride, fetch_output);
  }
}
#endif
#endif
}  // namespace gpu
