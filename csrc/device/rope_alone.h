// Rotary embeddings of so few heads that nothing keeps the card busy, and what counts is how long one thread takes.
//
// Even rows (rope_even.h), of float angles. A thread turns two pairs, makes the sines and cosines of them itself, and
// waits for no other.
#pragma once
#include "cells.h"
#include "rope_block.h"

namespace gpu {
#if !defined(GPU_HOST)
// n / d for n * d below 2^32; share: 2^32 / d, rounded up, and d more than 1.
GPU_FN u32 divide_by_share(u32 n, u32 share) { return share ? (u32)((u64)n * share >> 32) : n; }

template <i32 type> GPU_FN void rope_alone(const Rope& a) {
  constexpr int width = 2;
  using Pair = Cells<float, width, type>;
  const u32 item = block_x() * block_size_x() + thread_x(), row = divide_by_share(item, a.lane_share);
  const u32 place = divide_by_share(row, a.head_share), head = row - place * (u32)a.heads;
  if (place >= (u32)a.width) return;
  const RopeLane<width> lane(a, (i32)(item - row * (u32)a.lane_threads));
  const i64 from = place * a.in_x + head * a.in_head, to = place * a.out_x + head * a.out_head;
  Pair pairs[2];
  pairs[0].load(a.input, type, from + lane.low);
  pairs[1].load(a.input, type, from + lane.high);
  float u[width], v[width];
  if (lane.turns) {
    const float* const angles = reinterpret_cast<const float*>(a.cos) + place * a.angle_stride;
    float angle[2][width];
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      angle[0][i] = angles[(lane.low + i) * a.angle_step];
      angle[1][i] = angles[(lane.high + i) * a.angle_step];
    }
    pairs[0].get(u, type);
    pairs[1].get(v, type);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      float sine[2], cosine[2];
      sine_cosine((double)angle[0][i], sine[0], cosine[0]);
      sine[1] = sine[0], cosine[1] = cosine[0];
      // Mostly both halves of freqs are the same.
      if (bit_cast<u32>(angle[0][i]) != bit_cast<u32>(angle[1][i]))
        sine_cosine((double)angle[1][i], sine[1], cosine[1]);
      const float of_low = a.transposed ? sine[1] : -sine[0], of_high = a.transposed ? -sine[0] : sine[1];
      const float low = u[i], high = v[i];
      u[i] = fma(high, of_low, low * cosine[0]);
      v[i] = fma(low, of_high, high * cosine[1]);
    }
  } else {
    pairs[0].get(u, type);
    pairs[1].get(v, type);
  }
  Pair::store(a.output, type, to + lane.low, u);
  Pair::store(a.output, type, to + lane.high, v);
}
#endif
}  // namespace gpu
