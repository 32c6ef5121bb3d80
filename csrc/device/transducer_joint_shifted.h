// The joint of halves whose rows begin anywhere between two multiples of 16 bytes: memory is read and written in
// vectors all the same.
//
// What a thread wants of a row is read as the two vectors that it lies in. The forward writes a row in the vectors that
// the row has, so it reads f and g from where these begin, in each row elsewhere; both are small, and in a cache. At
// both ends of a row elements are written one by one.
#pragma once
#include "transducer_joint.h"

namespace gpu {
#if !defined(GPU_HOST)
// Eight columns that begin anywhere, as the two vectors that they lie in.
template <i32 type> struct JointShifted {
  using Math = float;
  static constexpr int width = 8;
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
  GPU_FN static void unpack(float (&x)[width], const Raw& raw) {
    u32 w[8];
    GPU_UNROLL_FOR (int i = 0; i < 4; ++i) {
      w[i] = raw.low.v[i];
      w[4 + i] = raw.high.v[i];
    }
    GPU_UNROLL_FOR (int i = 0; i < 6; ++i) w[i] = raw.past & 4 ? w[i + 2] : w[i];
    GPU_UNROLL_FOR (int i = 0; i < 5; ++i) w[i] = raw.past & 2 ? w[i + 1] : w[i];
    GPU_UNROLL_FOR (int i = 0; i < 4; ++i) w[i] = raw.past & 1 ? w[i] >> 16 | w[i + 1] << 16 : w[i];
    gpu::unpack(x, Words{{w[0], w[1], w[2], w[3]}}, type);
  }
  GPU_FN static void store(u8* to, i32, i64 count, const float (&x)[width]) {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i)
      if (i < count) store_one(to, type, i, x[i]);
  }
};

// A warp takes some labels of a frame, a row at a time.
template <i32 type> struct JointForwardShifted {
  using Access = JointShifted<type>;
  using Raw = typename Access::Raw;
  static constexpr int width = Access::width;

  const TransducerJointForward& a;
  const u8 *f_end, *g_end;
  u32 hidden;

  GPU_FN explicit JointForwardShifted(const TransducerJointForward& a_)
      : a(a_), f_end(a_.f + a_.batch * a_.frames * a_.hidden * 2), g_end(a_.g + a_.batch * a_.labels * a_.hidden * 2),
        hidden((u32)a_.hidden) {}

  GPU_FN void run() const {
    const u32 warps = block_size_x() / warp_size, label_tiles = tiles_of(a.labels, joint_tile_labels);
    const i64 warp = (i64)block_x() * warps + warp_uniform(thread_x() / warp_size), all = (i64)grid_x() * warps,
              units = a.batch * a.frames * label_tiles;
    for (i64 unit = warp; unit < units; unit += all) {
      const i64 frame = small_quotient(unit, label_tiles), b = small_quotient(frame, (u32)a.frames);
      const u32 first_label = (u32)(unit - frame * label_tiles) * joint_tile_labels, t = (u32)(frame - b * a.frames);
      const TransducerItem item(a, b);
      work(item, b, t, first_label);
      if (a.batch_offset && item.bad && t == 0 && first_label == 0)
        fill_rows(item.first < 0 ? 0 : item.first, item.end > a.rows ? a.rows : item.end, item.otherwise(0.0f));
    }
    if (a.batch_offset) {
      const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0;
      for (i64 row = (end < 0 ? 0 : end) + warp; row < a.rows; row += all) fill_rows(row, row + 1, -1.0f);
    }
  }

 private:
  GPU_FN void work(const TransducerItem& item, i64 b, u32 t, u32 first_label) const {
    const u32 frames = a.batch_offset ? item.frames : (u32)a.frames,
              labels = a.batch_offset ? item.labels : (u32)a.labels;
    const u8* const f = a.f + (b * a.frames + t) * hidden * 2;
    for (u32 u = first_label; t < frames && u < labels && u < first_label + joint_tile_labels; ++u) {
      const i64 row = item.row(t, u);
      if (t < item.frames && u < item.labels) add(row, f, a.g + (b * a.labels + u) * hidden * 2);
      else fill_rows(row, row + 1, item.otherwise(-1.0f));
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

  GPU_FN void add(i64 row, const u8* f, const u8* g) const {
    const float least = a.relu ? 0.0f : bit_cast<float>(0xff800000u);
    const Parts parts = parts_of(row);
    for (u32 vector = lane_id(); vector < parts.vectors; vector += warp_size) {
      const u32 at = (parts.head + vector * width) * 2;
      const Raw of_f = Access::load(f + at, type, width, f_end), of_g = Access::load(g + at, type, width, g_end);
      float x[width], y[width];
      Access::unpack(x, of_f);
      Access::unpack(y, of_g);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = max_or_nan(x[i] + y[i], least);
      parts.store(vector, x);
    }
    const u32 own = parts.own();
    if (own < hidden)
      store_one(parts.row, type, own, max_or_nan(load_one<float>(f, type, own) + load_one<float>(g, type, own), least));
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
