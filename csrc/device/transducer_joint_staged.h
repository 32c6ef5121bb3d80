// The joint's forward of halves whose rows begin anywhere between two multiples of 16 bytes.
//
// Some labels' rows of a frame lie side by side. A block adds them up a column a thread, so that it does not matter
// where f and g begin; they go to shared memory as they will lie in the output, and from there in its vectors. Only
// where such a stretch begins and ends elements are written one by one.
#pragma once
#include "transducer_joint.h"
#include "vector_copies.h"
#include "warp.h"

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
#if !defined(GPU_HIP)
// The backward of few enough labels that a block of threads has them all, or in a few turns, on cards whose blocks
// share memory enough: the rows of a frame come to shared memory as they lie, several frames ahead, and a thread sums
// one column of some of the labels.
template <i32 type, bool relu> struct JointBackwardStaged {
  static constexpr u32 threads = joint_staged_backward_threads, slab = joint_staged_slab, groups = threads / slab,
                       held = joint_staged_labels / groups, ahead = joint_staged_ahead,
                       row_vectors = slab / 8 + 1;  // that a row's columns lie in, at most
  const TransducerJointBackward& a;
  u8* stages;           // [ahead][joint_staged_tile_bytes]: rows as they lie in memory between multiples of 16 bytes
  float *parts, *sums;  // [2][groups][slab]: of a frame; [tile_frames][slab]: of the labels of turns before
  const u8* end_of_rows;
  u32 hidden, pitch, lane, group, column = 0, columns = 0, first_column = 0;

  GPU_FN JointBackwardStaged(const TransducerJointBackward& a_, u8* memory)
      : a(a_), end_of_rows(a_.grad_output + a_.rows * a_.hidden * 2), hidden((u32)a_.hidden) {
    stages = memory;
    parts = reinterpret_cast<float*>(memory + ahead * joint_staged_tile_bytes);
    sums = parts + 2 * threads;
    pitch = row_vectors * 16 + hidden * 2 % 16;
    lane = thread_x() % slab;
    group = warp_uniform(thread_x() / slab);
  }

  GPU_FN void run(u32 (&is_last)[1]) {
    const u32 slabs = tiles_of(a.hidden, slab), splits = (u32)a.splits;
    const i64 units = a.batch * splits * slabs;
    for (i64 unit = block_x(); unit < units; unit += grid_x()) {
      const i64 rest = small_quotient(unit, slabs), b = small_quotient(rest, splits);
      const u32 split = (u32)(rest - b * splits), begin = split * (u32)a.tile_frames,
                up_to = begin + (u32)a.tile_frames, end = up_to < (u32)a.frames ? up_to : (u32)a.frames;
      first_column = (u32)(unit - rest * slabs) * slab;
      column = first_column + lane;
      columns = hidden - first_column < slab ? hidden - first_column : slab;
      const TransducerItem item(a, b);
      const u32 live_end = item.labels == 0    ? begin
                           : end < item.frames ? end
                                               : item.frames,
                live_labels = item.frames ? item.labels : 0;
      if (begin < live_end)
        for (u32 label = 0; label < item.labels; label += joint_staged_labels)
          add_labels(item, b, split, begin, live_end, label);
      const float nothing = item.otherwise(0.0f);
      fill(a.grad_f, b * a.frames, live_end > begin ? live_end : begin, end, nothing);
      const bool last = splits == 1 || is_last_of(reinterpret_cast<u32*>(a.counters) + b * slabs + first_column / slab,
                                                  splits, is_last);
      if (!last) continue;
      if (splits > 1) add_splits<float>(a, item, b, first_column, slab);
      fill(a.grad_g, b * a.labels, live_labels, (u32)a.labels, nothing);
    }
  }

 private:
  GPU_FN void add_labels(const TransducerItem& item, i64 b, u32 split, u32 begin, u32 end, u32 label) {
    const u32 left = item.labels - label, count = left < joint_staged_labels ? left : joint_staged_labels,
              own = group * held, beyond = count > own ? count - own : 0, mine = beyond < held ? beyond : held;
    const bool has = column < hidden, last = left <= joint_staged_labels;
    const i64 first_row = item.row(begin, label), first_f = (b * a.frames + begin) * a.hidden + column;
    float minus_g[held] = {}, of_labels[held] = {};
    if (relu)
      GPU_UNROLL_FOR (u32 j = 0; j < held; ++j)
        if (j < mine && has)
          minus_g[j] = -load_one<float>(a.g, type, (b * a.labels + label + own + j) * a.hidden + column);
    const u8* const rows = a.grad_output + (first_row * a.hidden + first_column) * 2;  // of the first frame
    const i64 frame_bytes = item.stride * a.hidden * 2;
    sync_threads();  // what shared memory had before has been read
    const u32 frames = end - begin;
    GPU_UNROLL_FOR (u32 frame = 0; frame + 1 < ahead; ++frame) {
      if (frame < frames) fetch(frame, rows + frame * frame_bytes, count);
      end_copies();
    }
    float next_f = relu && has ? load_one<float>(a.f, type, first_f) : 0.0f;
    const auto finish = [&](u32 frame) {
      if (group != frame % groups || !has) return;
      float total = parts[frame % 2 * threads + lane];
      GPU_UNROLL_FOR (u32 n = 1; n < groups; ++n) total += parts[frame % 2 * threads + n * slab + lane];
      if (label) total += sums[frame * slab + lane];
      if (last) store_one(a.grad_f, type, first_f + frame * a.hidden, total * (float)a.scale);
      else sums[frame * slab + lane] = total;
    };
    for (u32 frame = 0;; ++frame) {
      await_copies<(int)ahead - 2>();
      sync_threads();
      if (frame) finish(frame - 1);
      if (frame == frames) break;
      const float f = next_f;
      if (relu && has && frame + 1 < frames) next_f = load_one<float>(a.f, type, first_f + (frame + 1) * a.hidden);
      if (frame + ahead - 1 < frames) fetch(frame + ahead - 1, rows + (frame + ahead - 1) * frame_bytes, count);
      end_copies();
      const u8* const from = stages + frame % ahead * joint_staged_tile_bytes + past_of(rows + frame * frame_bytes) +
                             own * pitch + lane * 2;
      float of_frame = 0.0f;
      if (mine == held) add<true>(from, f, minus_g, mine, of_frame, of_labels);
      else add<false>(from, f, minus_g, mine, of_frame, of_labels);
      parts[frame % 2 * threads + thread_x()] = of_frame;
    }
    const i64 first_g = (b * a.labels + label + own) * a.hidden + column;
    GPU_UNROLL_FOR (u32 j = 0; j < held; ++j) {
      if (j >= mine || !has) continue;
      const i64 at = first_g + j * a.hidden;
      if (a.splits == 1) store_one(a.grad_g, type, at, of_labels[j] * (float)a.scale);
      else reinterpret_cast<float*>(a.partials)[split * (a.batch * a.labels * a.hidden) + at] = of_labels[j];
    }
  }
  template <bool all> GPU_FN void add(const u8* from, float f, const float (&minus_g)[held], u32 mine, float& of_frame,
                                      float (&of_labels)[held]) const {
    GPU_UNROLL_FOR (u32 j = 0; j < held; ++j) {
      if (!all && j >= mine) continue;
      const float x = load_one<float>(from + j * pitch, type, 0);
      if (relu) {
        add_above(f, minus_g[j], x, of_frame, of_labels[j]);
      } else {
        of_frame += x;
        of_labels[j] += x;
      }
    }
  }
  // Bytes past a multiple of 16.
  GPU_FN static u32 past_of(const u8* p) { return (u32)((u64)p % sizeof(Words)); }
  // A frame's columns of `count` rows, on their way to its place. Each row lies there past a multiple of 16 bytes as in
  // memory, `pitch` after the one before.
  GPU_FN void fetch(u32 frame, const u8* rows, u32 count) const {
    const u32 past = past_of(rows), row_bytes = hidden * 2;
    const u8* const from = rows - past;
    u8* const to = stages + frame % ahead * joint_staged_tile_bytes;
    const bool inside = (u64)from + past + (u64)(count - 1) * row_bytes + columns * 2 + 16 <= (u64)end_of_rows;
    GPU_UNROLL_FOR (u32 n = 0; n < tiles_of(joint_staged_labels * row_vectors, threads); ++n) {
      const u32 k = n * threads + thread_x(), j = k / row_vectors, v = k % row_vectors * 16;
      const u32 at = past + j * row_bytes, begin = at & ~15u;
      if (j >= count || begin + v >= at + columns * 2) continue;
      u8* const there = to + ((past + j * pitch) & ~15u) + v;
      if (inside || from + begin + v + 16 <= end_of_rows) {
        copy_vector(there, from + begin + v);
      } else {
        const u16* const last = reinterpret_cast<const u16*>(from + begin + v);
        for (u32 i = 0; last + i < reinterpret_cast<const u16*>(end_of_rows); ++i)
          reinterpret_cast<u16*>(there)[i] = last[i];
      }
    }
  }
  // Rows [begin, end) of those from `first` on, which have no gradient.
  GPU_FN void fill(u8* tensor, i64 first, u32 begin, u32 end, float value) const {
    if (column < hidden)
      for (u32 row = begin + group; row < end; row += groups)
        store_one(tensor, type, (first + row) * a.hidden + column, value);
  }
};
template <i32 type, bool relu> GPU_FN void transducer_joint_backward_staged(const TransducerJointBackward& a) {
  GPU_SHARED(u32, is_last, 1);
  GPU_DYNAMIC_SHARED(Words, memory);
  JointBackwardStaged<type, relu>(a, reinterpret_cast<u8*>(memory)).run(is_last);
}
#endif
#endif
}  // namespace gpu
