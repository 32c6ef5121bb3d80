// The joint's forward of halves whose rows begin anywhere between two multiples of 16 bytes.
//
// Some labels' rows of a frame lie side by side. A block adds them up a column a thread, so that it does not matter
// where f and g begin; they go to shared memory as they will lie in the output, and from there in its vectors. Only
// where such a stretch begins and ends elements are written one by one.
#pragma once
#include "transducer_joint.h"

namespace gpu {
#if !defined(GPU_HOST)
// Halves side by side that begin and end anywhere, as the vectors that they lie in; Count holds how many.
template <class Count> struct JointStretch {
  static constexpr u32 width = 8;
  u8* first;
  u32 past, head;  // halves of the first vector before them; 1 where that is not whole
  Count end, vectors, whole;

  GPU_FN JointStretch(u8* tensor, i64 element, Count count) {
    u8* const at = tensor + element * 2;
    const u32 bytes = (u32)((u64)at % sizeof(Words));
    first = at - bytes;
    past = bytes / 2;
    head = past ? 1 : 0;
    end = past + count;
    vectors = (end + width - 1) / width;
    whole = end / width - head;
  }
  GPU_FN void store(Count v, const Words& w) const {
    if (v >= head && v - head < whole) {
      reinterpret_cast<Words*>(first)[v] = w;
      return;
    }
    GPU_UNROLL_FOR (u32 i = 0; i < width; ++i)
      if (v * width + i >= past && v * width + i < end)
        reinterpret_cast<u16*>(first)[v * width + i] = (u16)(w.v[i / 2] >> i % 2 * 16);
  }
};

template <i32 type> struct JointForwardStaged {
  static constexpr u32 threads = joint_forward_threads;
  const TransducerJointForward& a;
  Words* stages;  // [2][joint_stage_vectors]
  u32 hidden, turn = 0;

  GPU_FN JointForwardStaged(const TransducerJointForward& a_, Words* stages_)
      : a(a_), stages(stages_), hidden((u32)a_.hidden) {}

  // `columns`: of a thread.
  template <u32 columns> GPU_FN void run() {
    constexpr u32 rows = joint_staged_sums / columns;
    const u32 label_tiles = tiles_of(a.labels, rows), frame_tiles = tiles_of(a.frames, (u32)a.tile_frames);
    const i64 units = a.batch * frame_tiles * label_tiles;
    for (i64 unit = block_x(); unit < units; unit += grid_x()) {
      const i64 tile = small_quotient(unit, label_tiles), b = small_quotient(tile, frame_tiles);
      const TransducerItem item(a, b);
      add<rows, columns>(item, b, (u32)(tile - b * frame_tiles) * (u32)a.tile_frames,
                         (u32)(unit - tile * label_tiles) * rows);
      if (a.batch_offset && item.bad && unit == b * frame_tiles * label_tiles)
        fill_rows(item.first < 0 ? 0 : item.first, item.end > a.rows ? a.rows : item.end, 0, 1, item.otherwise(0.0f));
    }
    if (!a.batch_offset) return;
    const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0;
    fill_rows(end < 0 ? 0 : end, a.rows, block_x(), grid_x(), -1.0f);
  }

 private:
  // The rows of some frames and labels, as far as the output has them.
  template <u32 rows, u32 columns> GPU_FN void add(const TransducerItem& item, i64 b, u32 t, u32 u) {
    const u32 all_frames = a.batch_offset ? item.frames : (u32)a.frames,
              all_labels = a.batch_offset ? item.labels : (u32)a.labels;
    const u32 count = fewer(rows, all_labels, u), live = fewer(rows, item.labels, u),
              end = t + fewer((u32)a.tile_frames, all_frames, t);
    const u32 live_end = !live ? t : end < item.frames ? end : item.frames;
    if (t < live_end) add_frames<rows, columns>(item, b, t, live_end, u, live, count);
    for (t = t < live_end ? live_end : t; t < end; ++t)
      fill_rows(item.row(t, u), item.row(t, u) + count, 0, 1, item.otherwise(-1.0f));
  }
  // Of `count` rows of a frame, `live` are the item's.
  template <u32 rows, u32 columns> GPU_FN void add_frames(const TransducerItem& item, i64 b, u32 t, u32 end, u32 u,
                                                          u32 live, u32 count) {
    float g[rows][columns] = {}, next[columns] = {};
    GPU_UNROLL_FOR (u32 j = 0; j < rows; ++j)
      if (j < live) load(g[j], a.g, b * a.labels + u + j);
    load(next, a.f, b * a.frames + t);
    for (; t < end; ++t) {
      float f[columns];
      GPU_UNROLL_FOR (u32 k = 0; k < columns; ++k) f[k] = next[k];
      if (t + 1 < end) load(next, a.f, b * a.frames + t + 1);
      const JointStretch<u32> stretch(a.output, item.row(t, u) * a.hidden, count * hidden);
      // While others still read what was made before.
      Words* const stage = stages + turn++ % 2 * joint_stage_vectors;
      u8* const to = reinterpret_cast<u8*>(stage) + (stretch.past + thread_x()) * 2;
      if (live == rows) put<true>(to, f, g, live, count);
      else put<false>(to, f, g, live, count);
      sync_threads();
      for (u32 v = thread_x(); v < stretch.vectors; v += threads) stretch.store(v, stage[v]);
    }
  }
  // The sums of a frame: of `all` rows, or of those that live, and -1 beside them.
  template <bool all, u32 rows, u32 columns>
  GPU_FN void put(u8* to, const float (&f)[columns], const float (&g)[rows][columns], u32 live, u32 count) const {
    const float least = a.relu ? 0.0f : bit_cast<float>(0xff800000u);
    GPU_UNROLL_FOR (u32 k = 0; k < columns; ++k) {
      if (!has(k)) continue;
      GPU_UNROLL_FOR (u32 j = 0; j < rows; ++j)
        if (all || j < count)
          store_one(to, type, j * hidden + k * threads, all || j < live ? max_or_nan(f[k] + g[j][k], least) : -1.0f);
    }
  }
  // How many of `most` from `first` on are below `end`.
  GPU_FN static u32 fewer(u32 most, u32 end, u32 first) {
    const u32 left = end > first ? end - first : 0;
    return left < most ? left : most;
  }
  GPU_FN bool has(u32 k) const { return thread_x() + k * threads < hidden; }
  template <u32 columns> GPU_FN void load(float (&x)[columns], const u8* tensor, i64 row) const {
    const u8* const from = tensor + (row * a.hidden + thread_x()) * 2;
    GPU_UNROLL_FOR (u32 k = 0; k < columns; ++k)
      if (has(k)) x[k] = load_one<float>(from, type, k * threads);
  }
  // By `blocks` blocks, of which this is one.
  GPU_FN void fill_rows(i64 from, i64 to, i64 block, i64 blocks, float value) const {
    if (from >= to) return;
    float x[8];
    GPU_UNROLL_FOR (u32 i = 0; i < 8; ++i) x[i] = value;
    const Words w = pack(x, type);
    const JointStretch<i64> stretch(a.output, from * a.hidden, (to - from) * a.hidden);
    for (i64 v = block * threads + thread_x(); v < stretch.vectors; v += blocks * threads) stretch.store(v, w);
  }
};
template <i32 type> GPU_FN void transducer_joint_forward_staged(const TransducerJointForward& a) {
  GPU_SHARED(Words, stages, 2 * joint_stage_vectors);
  JointForwardStaged<type> joint(a, stages);
  switch (joint_staged_columns(a.hidden)) {
    case 1:
      return joint.template run<1>();
    case 2:
      return joint.template run<2>();
    default:
      return joint.template run<4>();
  }
}
#endif
}  // namespace gpu
