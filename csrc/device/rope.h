// Rotary positional embedding: arguments of the kernels and the CPU variant, by value, and what both agree on.
//
// Elements k and k + rotary / 2 of a head are a pair that is turned by the angles of its position:
//   out[k] = in[k] cos[k] - in[k + rotary/2] sin[k]
//   out[k + rotary/2] = in[k + rotary/2] cos[k + rotary/2] + in[k] sin[k + rotary/2]
// and elements past `rotary` are copied. `transposed` is the gradient of that: sines change place and sign. A position
// is one place of a sequence, or one (y, x) of an image, whose heads are two groups: angles of y, then of x.
#pragma once
#include "trigonometry.h"
#include "vectors.h"

namespace gpu {
struct Rope {
  const u8* input;
  u8* output;
  const u8* cos;    // [angle_rows][rotary]; without sin, the angles themselves
  const u8* sin;    // or null
  const u8* cos_x;  // of images: the angles of x; cos and sin are those of y
  const u8* sin_x;
  const i32* cu_seqlens;  // [sequences + 1]: where each sequence begins among the `width` places; or null
  i64 height;             // of images; else 1
  i64 width;              // of images; else places
  i64 batch, heads;
  i64 in_y, in_x, in_batch, in_head, in_element;  // strides, in elements
  i64 out_y, out_x, out_batch, out_head;          // likewise; elements of a head lie side by side
  i64 angle_stride, angle_step;                   // of cos and sin: from row to row, from element to element
  i64 angle_stride_x, angle_step_x;               // of cos_x and sin_x
  i64 angle_rows;
  i32 dim;     // elements of a head
  i32 rotary;  // of them, those that turn; of images, in each of the two groups
  i32 groups;  // 1, or 2 for images
  i32 sequences;
  i32 type;  // of input and output
  i32 angle_type;
  i32 transposed;
  i32 lane_threads;  // threads that share a head; the block's others take other heads
  i32 positions;     // of a block, at most rope_most_positions
  i32 table;         // 1: their sines and cosines lie in shared memory; 0: every thread makes its own
  // That many heads further: what a block has at once. Of even rows: step_heads alone, the next of a thread.
  i32 step_positions, step_batches, step_heads;
  i64 chunk_rows;  // rows (batch times heads) of a position that one block takes
  u32 chunks;      // blocks that share a position
  u32 blocks;      // in all
};
// Of the `alone` kernels (rope_alone.h); counts and strides in elements, every offset below 2^31.
struct RopeAlone {
  const u8* input;
  u8* output;
  const float* angles;
  u32 items;                                   // pairs, and what is copied in twos
  u32 lanes, lane_share, heads, head_share;    // of a head; heads of a place; 2^32 / each, rounded up, or 0 for 1
  u32 in_place, in_head, out_place, out_head;  // strides
  u32 angle_place, angle_step;                 // likewise
  u32 half, copied_half;                       // of those that turn, and of those that do not
  i32 transposed;
};
constexpr int rope_threads = 128;
constexpr int rope_most_positions = 32;
constexpr int rope_in_flight = 4;   // heads that a thread has loaded at once
constexpr int rope_even_heads = 8;  // of even rows: a thread's heads, at most

// What the position of a place is when no row of angles belongs to it.
constexpr i64 rope_unturned = -1;  // past the last sequence: padding, which is copied
constexpr i64 rope_wrong = -2;     // cu_seqlens make no sense, or the angles end before: nan

// What entry k of cu_seqlens bounds: sequence k - 1; of entry 0: all sequences.
struct RopeSpan { i32 begin, end; };
GPU_FN RopeSpan rope_span(const Rope& a, i32 k) {
  return k == 0 ? RopeSpan{a.cu_seqlens[0], a.cu_seqlens[a.sequences]} : RopeSpan{a.cu_seqlens[k - 1], a.cu_seqlens[k]};
}
// cu_seqlens must begin at 0, never fall, and stay within the places. Entry k's part of that.
GPU_FN bool rope_span_fits(const Rope& a, i32 k, RopeSpan s) {
  return k == 0 ? s.begin == 0 && s.end <= a.width : s.begin <= s.end;
}
// The row of angles of a place that lies in a sequence; it is a row that is there.
GPU_FN i64 rope_row(const Rope& a, i64 place, i64 begin) {
  return place - begin < a.angle_rows ? place - begin : rope_wrong;
}

GPU_FN double rope_angle_value(const u8* angles, i32 type, i64 index) {
  if (type == type_f64) return reinterpret_cast<const double*>(angles)[index];
  float x[1];
  load_values(x, angles, type, index);
  return (double)x[0];
}
// Cosine and signed sine of element e of the turned ones, at row `row` (of images: y, x): the pair's first half has
// -sin.
template <class Math> GPU_FN void rope_entry(const Rope& a, i64 row, i64 row_x, i32 e, Math& cosine, Math& sine) {
  const bool of_x = e >= a.rotary;
  const i32 k = of_x ? e - a.rotary : e;
  const i64 at = of_x ? row_x * a.angle_stride_x + k * a.angle_step_x : row * a.angle_stride + k * a.angle_step;
  if (row == rope_wrong) {
    cosine = sine = (Math)bit_cast<float>(0x7fc00000u);
  } else if (row == rope_unturned) {
    cosine = Math(1);
    sine = Math(0);
  } else if (a.sin) {
    cosine = (Math)rope_angle_value(of_x ? a.cos_x : a.cos, a.angle_type, at);
    sine = (Math)rope_angle_value(of_x ? a.sin_x : a.sin, a.angle_type, at);
  } else {
    sine_cosine(rope_angle_value(of_x ? a.cos_x : a.cos, a.angle_type, at), sine, cosine);
  }
  if (k < a.rotary / 2) sine = -sine;
}
}  // namespace gpu
