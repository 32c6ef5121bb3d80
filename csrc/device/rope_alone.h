// Rotary embeddings of so few heads that nothing keeps the card busy, and what counts is how long one thread takes.
//
// A thread turns one pair, or copies two elements; it makes the sine and cosine itself, and waits for no other. As few
// arguments and instructions as will do: most of them come from memory.
#pragma once
#include "few_rows.h"
#include "rope.h"

namespace gpu {
#if !defined(GPU_HOST)
template <class T> GPU_FN void rope_alone(const RopeAlone& a) {
  const u32 item = block_x() * block_size_x() + thread_x(), row = divide_by_share(item, a.lane_share);
  const u32 place = divide_by_share(row, a.head_share), head = row - place * a.heads, lane = item - row * a.lanes;
  const bool turns = lane < a.half;
  const u32 low = turns ? lane : lane + a.half, apart = turns ? a.half : a.copied_half;
  const T* const from = reinterpret_cast<const T*>(a.input) + (place * a.in_place + head * a.in_head + low);
  T* const to = reinterpret_cast<T*>(a.output) + (place * a.out_place + head * a.out_head + low);
  const float* const angles = a.angles + (place * a.angle_place + low * a.angle_step);
  await_previous_kernel();
  if (item >= a.items) return;
  T u = from[0], v = from[apart];
  if (turns) {
    const float of_low = angles[0], of_high = angles[a.half * a.angle_step];
    float sine[2], cosine[2];
    sine_cosine((double)of_low, sine[0], cosine[0]);
    sine[1] = sine[0], cosine[1] = cosine[0];
    // Mostly both halves of freqs are the same.
    if (bit_cast<u32>(of_low) != bit_cast<u32>(of_high)) sine_cosine((double)of_high, sine[1], cosine[1]);
    const float to_low = a.transposed ? sine[1] : -sine[0], to_high = a.transposed ? -sine[0] : sine[1];
    const float x = to_float(u), y = to_float(v);
    from_float(u, fma(y, to_low, x * cosine[0]));
    from_float(v, fma(x, to_high, y * cosine[1]));
  }
  to[0] = u;
  to[apart] = v;
}
#endif
}  // namespace gpu
