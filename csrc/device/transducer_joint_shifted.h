// The joint's backward of halves whose rows begin anywhere between two multiples of 16 bytes: what a thread wants of a
// row is read as the two vectors that it lies in.
#pragma once
#include "transducer_joint.h"

namespace gpu {
#if !defined(GPU_HOST)
// Eight columns that begin anywhere, as the two vectors that they lie in.
template <i32 type> struct JointShifted {
  using Math = float;
  static constexpr int width = 8, labels = joint_labels_of_shifted;
  static constexpr bool prefetches = true;
  struct Raw {
    Words low, high;
    u32 past;  // elements of `low` before the first column
  };
  GPU_FN static constexpr i32 type_of(i32) { return type; }
  GPU_FN static i64 bytes(i32, i64 elements) { return elements * 2; }
  // `count` of the columns are in the row; what is beyond may be anything. Memory begins with a vector and ends at
  // `end`, maybe within one.
  GPU_FN static Raw load(const u8* from, i32, i64 count, const u8* end) {
    Raw raw{};
    const u32 before = (u32)((u64)from % sizeof(Words));
    const Words* const at = reinterpret_cast<const Words*>(from - before);
    if (reinterpret_cast<const u8*>(at + 2) <= end) {
      raw.low = at[0];
      raw.high = at[1];
      raw.past = before / 2;
    } else {
      u64 half[2] = {0, 0};
      GPU_ROLLED_FOR(int i = 0; i < width; ++i) {
        const u64 x = i < count ? (u64) reinterpret_cast<const u16*>(from)[i] << i % 4 * 16 : 0;
        (i < 4 ? half[0] : half[1]) |= x;
      }
      raw.low = Words{{(u32)half[0], (u32)(half[0] >> 32), (u32)half[1], (u32)(half[1] >> 32)}};
    }
    return raw;
  }
  GPU_FN static void unpack(float (&x)[width], const Raw& raw) { gpu::unpack(x, columns(raw), type); }
  GPU_FN static Words columns(const Raw& raw) {
    u32 w[8];
    GPU_UNROLL_FOR (int i = 0; i < 4; ++i) {
      w[i] = raw.low.v[i];
      w[4 + i] = raw.high.v[i];
    }
    // By masks: of a choice compilers make an address, and an array in memory of these registers.
    const u32 by_two = 0u - (raw.past >> 2 & 1), by_one = 0u - (raw.past >> 1 & 1);
    GPU_UNROLL_FOR (int i = 0; i < 6; ++i) w[i] = (w[i + 2] & by_two) | (w[i] & ~by_two);
    GPU_UNROLL_FOR (int i = 0; i < 5; ++i) w[i] = (w[i + 1] & by_one) | (w[i] & ~by_one);
    const u32 bits = (raw.past & 1) * 16;
    GPU_UNROLL_FOR (int i = 0; i < 4; ++i) w[i] = (u32)(((u64)w[i + 1] << 32 | w[i]) >> bits);
    return Words{{w[0], w[1], w[2], w[3]}};
  }
  GPU_FN static void store(u8* to, i32, i64 count, const float (&x)[width]) {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i)
      if (i < count) store_one(to, type, i, x[i]);
  }
};
#endif
}  // namespace gpu
