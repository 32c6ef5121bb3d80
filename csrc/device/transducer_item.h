// What the items of a transducer's batch have, and where: [batch][frames][labels] rows, or packed: the items' own rows,
// one item behind another.
#pragma once
#include "gpu.h"

namespace gpu {
#if !defined(GPU_HOST)
// An item whose lengths or rows do not fit is bad: it has nothing.
struct TransducerItem {
  i64 first, stride;  // of rows: (t, u) is row first + t * stride + u
  i64 end;            // packed: the row after the item's last
  u32 frames, labels;
  bool bad;

  // At least `least_frames`; rows for `more_labels` labels more than the length says.
  template <class Arguments> GPU_FN TransducerItem(const Arguments& a, i64 b, i64 least_frames = 0,
                                                   i64 more_labels = 0) {
    const i64 f = length(a.f_len, a.wide_lengths, b), g = length(a.g_len, a.wide_lengths, b) + more_labels;
    bad = f < least_frames || f > a.frames || g < more_labels || g > a.labels;
    if (a.batch_offset) {
      const i64* const offset = reinterpret_cast<const i64*>(a.batch_offset);
      first = b ? offset[b - 1] : 0;
      end = offset[b];
      stride = g;
      bad = bad || first < 0 || end > a.rows || end - first != f * g;
    } else {
      first = b * a.frames * a.labels;
      stride = a.labels;
      end = first;
    }
    frames = bad ? 0 : (u32)f;
    labels = bad ? 0 : (u32)g;
  }
  GPU_FN i64 row(u32 t, u32 u) const { return first + t * stride + u; }
  template <class Math> GPU_FN Math otherwise(Math value) const {
    return bad ? (Math)bit_cast<float>(0x7fc00000u) : value;
  }

 private:
  GPU_FN static i64 length(const u8* lengths, i32 wide, i64 b) {
    return wide ? reinterpret_cast<const i64*>(lengths)[b] : (i64) reinterpret_cast<const i32*>(lengths)[b];
  }
};

// a / b, in 32 bits where that will do: a fraction of a division of 64.
GPU_FN i64 small_quotient(i64 a, u32 b) { return a <= 0x7fffffff ? (i64)((u32)a / b) : a / b; }
GPU_FN u32 tiles_of(i64 size, u32 tile) { return (u32)((size + tile - 1) / tile); }
#endif
}  // namespace gpu
