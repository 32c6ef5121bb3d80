// Rotary embeddings where the heads of a position are a constant stride apart, in the input and in the output.
//
// A thread's heads are all of one position: it takes its sines and cosines from shared memory once, and from one head
// to the next it adds a stride. All are on their way before the block looks for its rows and makes the sines: a second
// turn of loads behind that would leave memory idle.
#pragma once
#include "rope_block.h"
#include "trigonometry.h"

namespace gpu {
#if !defined(GPU_HOST)
// The sines and cosines of `count` positions. Mostly both halves of freqs are the same; then a pair needs one sine. Two
// pairs' angles are on their way at once, or as many as are asked for.
template <int at_once, class RowOf> GPU_FN void rope_even_table(const Rope& a, i32 count, const RowOf& row_of,
                                                                float* table) {
  const i32 turned = a.rotary, half = turned / 2, threads = (i32)block_size_x();
  if (a.sin || a.angle_type != type_f32) {
    for (i32 i = (i32)thread_x(); i < count * turned; i += threads) {
      const i32 p = i / turned, e = i - p * turned;
      rope_entry(a, row_of(p), 0, e, table[2 * p * turned + e], table[(2 * p + 1) * turned + e]);
    }
    return;
  }
  for (i32 i = (i32)thread_x(); i < count * half; i += at_once * threads) {
    float angle[at_once][2];
    i32 at[at_once];
    GPU_UNROLL_FOR (int n = 0; n < at_once; ++n) {
      const i32 pair = i + n * threads, p = pair / half, k = pair - p * half;
      at[n] = pair < count * half ? 2 * p * turned + k : -1;
      // Of places that have no row: wrong ones get nan, and those that are not turned need nothing.
      angle[n][0] = angle[n][1] = bit_cast<float>(0x7fc00000u);
      const i64 row = at[n] < 0 ? rope_wrong : row_of(p);
      if (row < 0) continue;
      const float* const angles = reinterpret_cast<const float*>(a.cos) + row * a.angle_stride;
      angle[n][0] = angles[k * a.angle_step];
      angle[n][1] = angles[(k + half) * a.angle_step];
    }
    GPU_UNROLL_FOR (int n = 0; n < at_once; ++n) {
      if (at[n] < 0) continue;
      float sine[2], cosine[2];
      sine_cosine((double)angle[n][0], sine[0], cosine[0]);
      sine[1] = sine[0];
      cosine[1] = cosine[0];
      if (bit_cast<u32>(angle[n][0]) != bit_cast<u32>(angle[n][1]))
        sine_cosine((double)angle[n][1], sine[1], cosine[1]);
      table[at[n]] = cosine[0];
      table[at[n] + half] = cosine[1];
      table[at[n] + turned] = -sine[0];
      table[at[n] + turned + half] = sine[1];
    }
  }
}

// `most_heads`: of a thread.
template <int width, i32 type, int most_heads> GPU_FN void rope_even(const Rope& a) {
  GPU_DYNAMIC_SHARED(float, table);
  GPU_SHARED(i64, rows_of, rope_most_positions);
  GPU_SHARED(i32, broken, 1);
  const u32 slot = thread_x() / (u32)a.lane_threads, step = (u32)a.step_heads;  // `step` slots share a position
  const i32 position = (i32)(slot / step);
  const i64 first = (i64)(block_x() / a.chunks) * a.positions;
  const i32 count = (i32)(a.width - first < a.positions ? a.width - first : a.positions);
  const u32 begin = block_x() % a.chunks * (u32)a.chunk_rows, heads = (u32)a.heads;
  const u32 end = position >= count ? 0 : heads - begin < (u32)a.chunk_rows ? heads : begin + (u32)a.chunk_rows;
  const u32 head = begin + slot % step;
  const RopeLane<width> lane(a, (i32)(thread_x() % (u32)a.lane_threads));

  RopeSpan mine{};  // is on its way first: most waits for it
  if (a.cu_seqlens && (i32)thread_x() <= a.sequences) mine = rope_span(a, (i32)thread_x());

  const i64 bytes = bytes_of(type), apart = (lane.high - lane.low) * bytes;
  const u8* const from = a.input + ((first + position) * a.in_x + head * a.in_head + lane.low) * bytes;
  u8* const to = a.output + ((first + position) * a.out_x + head * a.out_head + lane.low) * bytes;
  const i64 in_step = step * a.in_head * bytes, out_step = step * a.out_head * bytes;
  Words low[most_heads], high[most_heads];
  GPU_UNROLL_FOR (int n = 0; n < most_heads; ++n) {
    if (head + n * step < end) {
      low[n] = load_words<width>(from + n * in_step, type);
      high[n] = load_words<width>(from + n * in_step + apart, type);
    }
  }

  if (a.cu_seqlens) rope_find_rows(a, first, count, mine, rows_of, broken);
  const auto row_of = [&](i32 p) { return a.cu_seqlens ? rows_of[p] : first + p; };
  rope_even_table<most_heads == 1 ? 1 : 2>(a, count, row_of, table);
  sync_threads();
  if (head >= end) return;

  const bool turns = lane.turns && row_of(position) != rope_unturned;
  float cos_low[width], cos_high[width], sin_low[width], sin_high[width];
  if (turns) {
    const float* const c = table + 2 * position * a.rotary;
    const float* const s = c + a.rotary;
    rope_copy(cos_low, c + lane.low);
    rope_copy(cos_high, c + lane.high);
    rope_copy(sin_low, s + (a.transposed ? lane.high : lane.low));
    rope_copy(sin_high, s + (a.transposed ? lane.low : lane.high));
  }
  GPU_UNROLL_FOR (int n = 0; n < most_heads; ++n) {
    if (head + n * step >= end) return;
    if (turns) {
      float u[width], v[width], turned_u[width], turned_v[width];
      unpack(u, low[n], type);
      unpack(v, high[n], type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        turned_u[i] = fma(v[i], sin_low[i], u[i] * cos_low[i]);
        turned_v[i] = fma(u[i], sin_high[i], v[i] * cos_high[i]);
      }
      low[n] = pack(turned_u, type);
      high[n] = pack(turned_v, type);
    }
    store_words<width>(to + n * out_step, type, low[n]);
    store_words<width>(to + n * out_step + apart, type, high[n]);
  }
}
#endif
}  // namespace gpu
