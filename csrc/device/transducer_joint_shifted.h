// The joint of halves whose rows begin anywhere between two multiples of 16 bytes: memory is read and written in
// vectors all the same.
//
// What a thread wants of a row is read as the two vectors that it lies in. The forward writes a row in the vectors that
// the row has, so it reads f and g from where these begin. Rows that are eight labels or eight frames apart lie alike:
// a warp takes those together, and shifts each of f and g once for several sums. At both ends of a row elements are
// written one by one.
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
    GPU_UNROLL_FOR (int i = 0; i < 6; ++i) w[i] = raw.past & 4 ? w[i + 2] : w[i];
    GPU_UNROLL_FOR (int i = 0; i < 5; ++i) w[i] = raw.past & 2 ? w[i + 1] : w[i];
    const u32 bits = (raw.past & 1) * 16;
    GPU_UNROLL_FOR (int i = 0; i < 4; ++i) w[i] = (u32)(((u64)w[i + 1] << 32 | w[i]) >> bits);
    return Words{{w[0], w[1], w[2], w[3]}};
  }
  GPU_FN static void store(u8* to, i32, i64 count, const float (&x)[width]) {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i)
      if (i < count) store_one(to, type, i, x[i]);
  }
};

// A warp takes some labels and some frames, each eight apart.
template <i32 type> struct JointForwardShifted {
  using Access = JointShifted<type>;
  using Raw = typename Access::Raw;
  static constexpr int width = Access::width;
  static constexpr u32 apart = 8, labels = joint_shifted_labels, frames = joint_shifted_frames;

  const TransducerJointForward& a;
  const u8 *f_end, *g_end;
  u32 hidden;

  GPU_FN explicit JointForwardShifted(const TransducerJointForward& a_)
      : a(a_), f_end(a_.f + a_.batch * a_.frames * a_.hidden * 2), g_end(a_.g + a_.batch * a_.labels * a_.hidden * 2),
        hidden((u32)a_.hidden) {}

  GPU_FN void run() const {
    const u32 warps = block_size_x() / warp_size, label_units = tiles_of(a.labels, apart * labels) * apart,
              frame_units = tiles_of(a.frames, apart * frames) * apart;
    const i64 warp = (i64)block_x() * warps + warp_uniform(thread_x() / warp_size), all = (i64)grid_x() * warps,
              units = a.batch * frame_units * label_units;
    for (i64 unit = warp; unit < units; unit += all) {
      const i64 rest = small_quotient(unit, label_units), b = small_quotient(rest, frame_units);
      const u32 label_unit = (u32)(unit - rest * label_units), frame_unit = (u32)(rest - b * frame_units);
      const TransducerItem item(a, b);
      work(item, b, frame_unit / apart * (apart * frames) + frame_unit % apart,
           label_unit / apart * (apart * labels) + label_unit % apart);
      if (a.batch_offset && item.bad && frame_unit == 0 && label_unit == 0)
        fill_rows(item.first < 0 ? 0 : item.first, item.end > a.rows ? a.rows : item.end, item.otherwise(0.0f));
    }
    if (a.batch_offset) {
      const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0;
      for (i64 row = (end < 0 ? 0 : end) + warp; row < a.rows; row += all) fill_rows(row, row + 1, -1.0f);
    }
  }

 private:
  // How many of `count` from `first` on, eight apart, are below `end`.
  GPU_FN static u32 below(u32 end, u32 first, u32 count) {
    const u32 found = end > first ? (end - first + apart - 1) / apart : 0;
    return found < count ? found : count;
  }
  GPU_FN void work(const TransducerItem& item, i64 b, u32 t, u32 u) const {
    const u32 live_frames = below(item.frames, t, frames), live_labels = below(item.labels, u, labels);
    if (live_frames && live_labels) add(item, b, t, u, live_frames, live_labels);
    if (a.batch_offset) return;
    const u32 all_frames = below((u32)a.frames, t, frames), all_labels = below((u32)a.labels, u, labels);
    for (u32 i = 0; i < all_frames; ++i)
      for (u32 j = i < live_frames ? live_labels : 0; j < all_labels; ++j) {
        const i64 row = item.row(t + i * apart, u + j * apart);
        fill_rows(row, row + 1, item.otherwise(-1.0f));
      }
  }

  // How a row lies in memory: elements, vectors, elements.
  struct Parts {
    u8* row;
    u32 head, vectors, tail;
    GPU_FN Parts(u8* row_, u32 hidden) : row(row_) {
      const u32 past = (u32)((u64)row % sizeof(Words)) / 2;
      head = past ? width - past : 0;
      vectors = (hidden - head) / width;
      tail = hidden - head - vectors * width;
    }
    // The column that the lane writes by itself, or none.
    GPU_FN u32 own() const {
      const u32 lane = lane_id(), of_tail = lane - width;
      return lane < head ? lane : lane >= width && of_tail < tail ? head + vectors * width + of_tail : ~0u;
    }
    GPU_FN void store(u32 vector, const float (&x)[width]) const {
      reinterpret_cast<Words*>(row + head * 2)[vector] = pack(x, type);
    }
  };
  GPU_FN Parts parts_of(i64 row) const { return Parts(a.output + row * hidden * 2, hidden); }

  GPU_FN void add(const TransducerItem& item, i64 b, u32 t, u32 u, u32 live_frames, u32 live_labels) const {
    const float least = a.relu ? 0.0f : bit_cast<float>(0xff800000u);
    const i64 row = item.row(t, u);
    const Parts parts = parts_of(row);
    const u64 row_bytes = (u64)hidden * 2, label_bytes = apart * row_bytes, frame_bytes = item.stride * label_bytes;
    const u8* const f = a.f + (b * a.frames + t) * row_bytes;
    const u8* const g = a.g + (b * a.labels + u) * row_bytes;
    for (u32 vector = lane_id(); vector < parts.vectors; vector += warp_size) {
      const u32 at = (parts.head + vector * width) * 2;
      Words gs[labels] = {};
      GPU_UNROLL_FOR (u32 j = 0; j < labels; ++j)
        if (j < live_labels) gs[j] = Access::columns(Access::load(g + at + j * label_bytes, type, width, g_end));
      Raw next = Access::load(f + at, type, width, f_end);
      for (u32 i = 0; i < live_frames; ++i) {
        float x[width];
        Access::unpack(x, next);
        if (i + 1 < live_frames) next = Access::load(f + at + (i + 1) * label_bytes, type, width, f_end);
        u8* to = parts.row + at + i * frame_bytes;
        GPU_UNROLL_FOR (u32 j = 0; j < labels; ++j) {
          if (j >= live_labels) continue;
          float y[width];
          unpack(y, gs[j], type);
          GPU_UNROLL_FOR (int k = 0; k < width; ++k) y[k] = max_or_nan(x[k] + y[k], least);
          *reinterpret_cast<Words*>(to + j * label_bytes) = pack(y, type);
        }
      }
    }
    const u32 own = parts.own();
    if (own >= hidden) return;
    float y[labels] = {};
    GPU_UNROLL_FOR (u32 j = 0; j < labels; ++j)
      if (j < live_labels) y[j] = load_one<float>(g + j * label_bytes, type, own);
    for (u32 i = 0; i < live_frames; ++i) {
      const float x = load_one<float>(f + i * label_bytes, type, own);
      GPU_UNROLL_FOR (u32 j = 0; j < labels; ++j)
        if (j < live_labels)
          store_one(parts.row + i * frame_bytes + j * label_bytes, type, own, max_or_nan(x + y[j], least));
    }
  }
  GPU_FN void fill_rows(i64 from, i64 to, float value) const {
    float x[width];
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = value;
    for (i64 row = from; row < to; ++row) {
      const Parts parts = parts_of(row);
      for (u32 vector = lane_id(); vector < parts.vectors; vector += warp_size) parts.store(vector, x);
      if (const u32 own = parts.own(); own < hidden) store_one(parts.row, type, own, value);
    }
  }
};
#endif
}  // namespace gpu
