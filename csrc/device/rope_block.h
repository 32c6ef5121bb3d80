// What the kernels of rotary embeddings share: a thread's part of a head, and the rows of a block's positions.
#pragma once
#include "rope.h"

namespace gpu {
#if !defined(GPU_HOST)
// The two vectors of a head that are a thread's: halves of pairs, or two of those that are copied.
template <int width> struct RopeLane {
  i32 low, high;
  bool turns, has_high;

  GPU_FN RopeLane(const Rope& a, i32 lane) {
    const i32 half = a.rotary / 2, in_group = half / width, turning = a.groups * in_group;
    turns = lane < turning;
    if (turns) {
      const i32 group = lane >= in_group;
      low = group * a.rotary + (lane - group * in_group) * width;
      high = low + half;
      has_high = true;
    } else {
      const i32 rest = (a.dim - a.groups * a.rotary) / width, first_half = (rest + 1) / 2, mine = lane - turning;
      low = a.groups * a.rotary + mine * width;
      high = low + first_half * width;
      has_high = first_half + mine < rest;
    }
  }
  GPU_FN static i32 count(const Rope& a) {
    return a.groups * (a.rotary / 2 / width) + ((a.dim - a.groups * a.rotary) / width + 1) / 2;
  }
};

// Of shared memory, at a multiple of the vector's size.
template <class Math, int width> GPU_FN void rope_copy(Math (&to)[width], const Math* from) {
  constexpr int side = width < 4 ? width : 4;
  GPU_UNROLL_FOR (int i = 0; i < width; i += side) {
    const Vector<Math, side> x = *reinterpret_cast<const Vector<Math, side>*>(from + i);
    GPU_UNROLL_FOR (int j = 0; j < side; ++j) to[i + j] = x.v[j];
  }
}

// Each position's row of angles, in shared memory; for all threads of the block together. Each looks at its part of
// cu_seqlens, of which it has loaded the first, `mine`: no load waits for another one's value, as a search's would.
GPU_FN void rope_find_rows(const Rope& a, i64 first, i32 count, RopeSpan mine, i64* rows_of, i32* broken) {
  const i32 thread = (i32)thread_x(), threads = (i32)block_size_x();
  if (thread == 0) broken[0] = 0;
  sync_threads();
  for (i32 k = thread; k <= a.sequences; k += threads)
    if (!rope_span_fits(a, k, k == thread ? mine : rope_span(a, k))) raise_flag(broken);
  sync_threads();
  if (broken[0]) {
    if (thread < count) rows_of[thread] = rope_wrong;
  } else {
    // Spans that fit do not overlap: one thread writes a row. Past the last sequence, the one with all of them does.
    for (i32 k = thread; k <= a.sequences; k += threads) {
      const RopeSpan span = k == thread ? mine : rope_span(a, k);
      const i64 begin = k == 0 ? span.end : span.begin, end = k == 0 ? a.width : span.end;
      const i64 stop = end - first < count ? end - first : count;
      for (i64 p = begin > first ? begin - first : 0; p < stop; ++p)
        rows_of[p] = k == 0 ? rope_unturned : rope_row(a, first + p, begin);
    }
  }
  sync_threads();
}
#endif
}  // namespace gpu
