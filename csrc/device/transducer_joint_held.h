// The joint's backward of halves where a block holds all of an item's labels: the gradient of the output is read once,
// in vectors, and summed over labels, to that of f, and over frames, to that of g.
//
// A block takes a slab of columns of consecutive frames. A warp takes a frame at a time: its lanes are side by side on
// a row, and beside them other labels. A thread holds the sums of its labels over frames, and its rows of the next
// frame are on their way while it works on one. Warps that have the other labels of the same frames make a stream: what
// they have of a frame is added up in shared memory a few frames later, behind a barrier that the other streams do not
// wait at. Registers limit how many rows are on their way, and with them the speed; so g waits in shared memory,
// packed.
#pragma once
#include "transducer_joint.h"
#include "vector_copies.h"
#include "warp.h"

namespace gpu {
#if !defined(GPU_HOST)
// Adds x to both sums where f is above minus_g, or either is a nan; of packed vectors.
template <i32 type> GPU_FN void add_above(const Words& f, const Words& minus_g, const float (&x)[8], float (&first)[8],
                                          float (&second)[8]) {
#if defined(GPU_CUDA) && __CUDA_ARCH__ >= 900
  // Two at once, as they lie.
#define ADD_ABOVE(pair)                                                                                             \
  asm("{\n\t.reg .pred low, high;\n\tsetp.gtu." pair                                                                \
      " low|high, %4, %5;\n\t"                                                                                      \
      "@low add.f32 %0, %0, %6;\n\t@low add.f32 %1, %1, %6;\n\t@high add.f32 %2, %2, %7;\n\t@high add.f32 %3, %3, " \
      "%7;\n\t}"                                                                                                    \
      : "+f"(first[i]), "+f"(second[i]), "+f"(first[i + 1]), "+f"(second[i + 1])                                    \
      : "r"(f.v[i / 2]), "r"(minus_g.v[i / 2]), "f"(x[i]), "f"(x[i + 1]))
  GPU_UNROLL_FOR (int i = 0; i < 8; i += 2) {
    if constexpr (type == type_f16) ADD_ABOVE("f16x2");
    else ADD_ABOVE("bf16x2");
  }
#undef ADD_ABOVE
#else
  float a[8], b[8];
  unpack(a, f, type);
  unpack(b, minus_g, type);
  GPU_UNROLL_FOR (int i = 0; i < 8; ++i) add_above(a[i], b[i], x[i], first[i], second[i]);
#endif
}

template <i32 type, JointMask masking> struct JointHeld {
  static constexpr bool relu = masking == JointMask::relu, dropout = masking == JointMask::bits;
  static constexpr int threads = joint_held_threads, held = joint_held_labels, width = 8,
                       lanes = joint_held_slab / width, label_lanes = warp_size / lanes;
  static constexpr int turns = 4;  // frames of a warp between barriers
  static constexpr u32 slab = joint_held_slab, warps = threads / warp_size, warp_labels = held * label_lanes,
                       quads = slab / 4, pairs = slab / 2;
  static constexpr u32 entries = label_lanes / 2;  // sums of a frame that a warp has
  using Pair = Vector<float, 2>;
  using Quad = Vector<float, 4>;
  // A thread's rows of a frame; with dropout, of each the bits of what passes.
  struct Rows {
    Words row[held];
    u32 bits[dropout ? held : 1];
  };

  // Shared memory, in vectors of 16 bytes. At the end sums over frames lie where sums of frames were.
  static constexpr u32 g_vectors = relu ? warps * held * warp_size : 0, f_vectors = relu ? turns * warps * lanes : 0;
  static constexpr u32 sum_vectors = turns * warps * entries * quads, end_vectors = warps * warp_labels * quads;
  static constexpr u32 loop_vectors = 2 * (f_vectors + sum_vectors),
                       shared_vectors = g_vectors + (loop_vectors > end_vectors ? loop_vectors : end_vectors);
  static_assert(warps * warp_labels == joint_held_most_labels &&
                    shared_vectors * 16 <= (relu ? joint_held_relu_shared_bytes : joint_held_shared_bytes),
                "as the host knows it");

  const TransducerJointBackward& a;
  Words* g;    // this thread's own: [held], warp_size apart
  Words* fs;   // this stream's: [2][turns][lanes]
  Quad* sums;  // over labels, of this stream's frames: [2][turns][groups * entries][quads]
  Quad* all;   // sums over frames: [streams][groups * warp_labels][quads]
  u32 hidden, lane, label_lane, groups, group, streams, stream, stream_threads;

  GPU_FN JointHeld(const TransducerJointBackward& a_, Words* memory) : a(a_), hidden((u32)a_.hidden) {
    const u32 warp = warp_uniform(thread_x() / warp_size);
    lane = lane_id() % lanes;
    label_lane = lane_id() / lanes;
    groups = tiles_of(a.labels, warp_labels);  // of labels, a warp's each
    streams = warps / groups;
    group = warp % groups;
    stream = warp / groups;  // the last warps may be too few for one
    stream_threads = (stream < streams ? groups : warps - streams * groups) * warp_size;
    g = memory + warp * (held * warp_size) + lane_id();
    memory += g_vectors;
    fs = memory + stream * (turns * lanes);
    sums = reinterpret_cast<Quad*>(memory + 2 * f_vectors) + stream * (turns * groups * entries * quads);
    all = reinterpret_cast<Quad*>(memory);
  }

  GPU_FN void run(u32 (&is_last)[1]) {
    const u32 slabs = tiles_of(a.hidden, slab), splits = (u32)a.splits;
    const i64 units = a.batch * splits * slabs;
    for (i64 unit = block_x(); unit < units; unit += grid_x()) {
      const i64 rest = small_quotient(unit, slabs), b = small_quotient(rest, splits);
      const u32 split = (u32)(rest - b * splits), first_column = (u32)(unit - rest * slabs) * slab;
      const u32 begin = split * (u32)a.tile_frames, up_to = begin + (u32)a.tile_frames,
                end = up_to < (u32)a.frames ? up_to : (u32)a.frames;
      if (unit != block_x()) sync_threads();  // what shared memory had before has been read
      // What does not depend on the item's lengths is on its way while they are.
      fetch_g(b, first_column);
      fetch_fs(b, begin + stream, end, first_column, 0);
      Rows rows = {};
      if (!a.batch_offset)
        fetch(rows, b * a.frames * a.labels, a.labels, begin + stream, end, (u32)a.labels, first_column);
      const TransducerItem item(a, b);
      const u32 live_end = item.labels == 0    ? begin
                           : end < item.frames ? end
                                               : item.frames,
                live_labels = item.frames ? item.labels : 0;
      if (a.batch_offset) fetch(rows, item.first, item.stride, begin + stream, live_end, item.labels, first_column);
      if (begin < live_end) add(item, b, split, begin, live_end, first_column, rows);
      fill(a.grad_f, b * a.frames, live_end > begin ? live_end : begin, end, first_column, item);
      const bool last =
          splits == 1 ||
          is_last_of(reinterpret_cast<u32*>(a.counters) + b * slabs + (u32)(unit - rest * slabs), splits, is_last);
      if (last && splits > 1) add_splits<float>(a, item, b, first_column, slab);
      if (last) fill(a.grad_g, b * a.labels, live_labels, (u32)a.labels, first_column, item);
    }
  }

 private:
  GPU_FN u32 label() const {
    return group * warp_labels + label_lane;
  }  // the first of this thread's, label_lanes apart
  GPU_FN u32 column(u32 first_column) const { return first_column + lane * width; }
  GPU_FN i32 labels_of(u32 labels, u32 first_column) const {
    return stream < streams && column(first_column) < hidden && label() < labels
               ? (i32)((labels - label() + label_lanes - 1) / label_lanes)
               : 0;
  }
  GPU_FN i64 row_bytes() const { return (i64)hidden * 2; }

  // ---- what comes from memory -------------------------------------------------------------------------------
  GPU_FN void fetch(Rows& rows, i64 first, i64 stride, u32 t, u32 end, u32 labels, u32 first_column) const {
    const i32 mine = t < end ? labels_of(labels, first_column) : 0;
    const i64 row = first + t * stride + label();
    fetch(rows, a.grad_output + row * row_bytes() + column(first_column) * 2, bits_of(row, first_column), mine);
  }
  GPU_FN const u8* bits_of(i64 row, u32 first_column) const {
    return a.mask + row * (hidden / width) + column(first_column) / width;
  }
  // `mine` of the rows, label_lanes apart.
  GPU_FN void fetch(Rows& rows, const u8* from, const u8* bits, i32 mine) const {
    const u32 label_bytes = label_lanes * (u32)row_bytes(), label_bits = label_lanes * (hidden / width);
    GPU_UNROLL_FOR (int h = 0; h < held; ++h) {
      if (h >= mine) continue;
      rows.row[h] = load_once(reinterpret_cast<const Words*>(from + h * label_bytes));
      if constexpr (dropout) rows.bits[h] = bits[h * label_bits];
    }
  }
  GPU_FN void fetch_g(i64 b, u32 first_column) const {
    if constexpr (relu) {
      const i32 mine = labels_of((u32)a.labels, first_column);
      GPU_UNROLL_FOR (int h = 0; h < held; ++h)
        if (h < mine)
          copy_vector(g + h * warp_size,
                      a.g + (b * a.labels + label() + h * label_lanes) * row_bytes() + column(first_column) * 2);
    }
  }
  // Frames of f from `first` on, `streams` apart, those that the stream takes between two barriers.
  GPU_FN void fetch_fs(i64 b, u32 first, u32 end, u32 first_column, u32 buffer) const {
    if constexpr (relu)
      for (u32 k = group * warp_size + lane_id(); stream < streams && k < turns * lanes; k += stream_threads) {
        const u32 t = first + k / lanes * streams, at = first_column + k % lanes * width;
        if (t < end && at < hidden)
          copy_vector(fs + buffer * f_vectors + k, a.f + (b * a.frames + t) * row_bytes() + at * 2);
      }
    end_copies();
  }

  // ---- both sums --------------------------------------------------------------------------------------------
  // Frames [begin, end) of an item that has labels: all of f's gradient, and split `split` of g's. `next`: the first
  // rows.
  GPU_FN void add(const TransducerItem& item, i64 b, u32 split, u32 begin, u32 end, u32 first_column, Rows& next) {
    const i32 mine = labels_of(item.labels, first_column);
    GPU_UNROLL_FOR (int h = 0; h < held; ++h)
      if (h >= mine) next.row[h] = Words{};  // and that stays so
    const i64 frame_bytes = streams * item.stride * row_bytes();
    const u8* ahead =
        a.grad_output + item.row(begin + streams + stream, label()) * row_bytes() + column(first_column) * 2;
    const u8* bits_ahead = bits_of(item.row(begin + streams + stream, label()), first_column);
    // The lanes of a row share its labels' lines; those of the frame after the next are fetched so far.
    const bool prefetches = lane < held && stream < streams && label() + lane * label_lanes < item.labels;
    const u8* far = a.grad_output + item.row(begin + 2 * streams + stream, label() + lane * label_lanes) * row_bytes() +
                    first_column * 2;
    float of_labels[held][width] = {};
    u32 buffer = 0, first = begin + stream;
    for (u32 left = tiles_of(tiles_of(end - begin, streams), turns); left;
         --left, first += turns * streams, buffer ^= 1) {
      await_copies<0>();
      sync_stream();
      if (first != begin + stream) put_frames(b, first - turns * streams, end, first_column, buffer ^ 1);
      fetch_fs(b, first + turns * streams, end, first_column, buffer ^ 1);
      const Words* const f_at = fs + buffer * f_vectors + lane;
      Quad* const to = sums + buffer * sum_vectors + (group * entries + label_lane % entries) * quads +
                       label_lane / entries * lanes + lane;
      GPU_UNROLL_FOR (int turn = 0; turn < turns; ++turn) {
        const u32 t = first + turn * streams;
        const Rows rows = next;
        if (t + streams < end) fetch(next, ahead, bits_ahead, mine);
        if (prefetches && t + 2 * streams < end) prefetch(far);
        ahead += frame_bytes;
        if constexpr (dropout) bits_ahead += frame_bytes / 2 / width;
        far += frame_bytes;
        loads_first();
        float of_frame[width] = {};
        if (stream < streams && t < end) {
          Words minus_f{};
          if constexpr (relu) {
            minus_f = f_at[turn * lanes];
            GPU_UNROLL_FOR (int i = 0; i < 4; ++i) minus_f.v[i] ^= 0x80008000u;
          }
          GPU_UNROLL_FOR (int h = 0; h < held; ++h) {
            float x[width];
            unpack(x, rows.row[h], type);
            if constexpr (dropout)
              GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = rows.bits[h] >> i & 1 ? x[i] : 0.0f;
            if constexpr (relu) add_above<type>(load_in_place(g + h * warp_size), minus_f, x, of_frame, of_labels[h]);
            else
              GPU_UNROLL_FOR (int i = 0; i < width; ++i) of_frame[i] += x[i], of_labels[h][i] += x[i];
          }
        }
        const Quad sum = half_over_lanes(of_frame);
        if (stream < streams) to[turn * groups * entries * quads] = sum;
      }
    }
    await_copies<0>();
    sync_stream();
    put_frames(b, first - turns * streams, end, first_column, buffer ^ 1);
    sync_threads();
    put_labels(item, b, split, first_column, of_labels);
  }
  GPU_FN void sync_stream() const {
    if (groups == 1) sync_warp();
    else sync_team(stream, stream_threads);
  }
  // Of a frame's sums: the lanes of one half of the warp keep the first four columns, and get the other half's sums of
  // them.
  GPU_FN static Quad half_over_lanes(const float (&x)[width]) {
    const u32 upper = 0 - lane_id() / (warp_size / 2);
    Quad sum;
    GPU_UNROLL_FOR (int i = 0; i < 4; ++i) {
      const u32 low = bit_cast<u32>(x[i]), high = bit_cast<u32>(x[4 + i]);
      sum.v[i] = bit_cast<float>((high & upper) | (low & ~upper)) +
                 shuffle_xor_value(bit_cast<float>((low & upper) | (high & ~upper)), warp_size / 2);
    }
    return sum;
  }

  // ---- what goes to memory ----------------------------------------------------------------------------------
  // Frames from `first` on, `streams` apart: the sums that the stream's warps have of them.
  GPU_FN void put_frames(i64 b, u32 first, u32 end, u32 first_column, u32 buffer) const {
    for (u32 k = group * warp_size + lane_id(); stream < streams && k < turns * pairs; k += stream_threads) {
      const u32 turn = k / pairs, t = first + turn * streams, pair = k % pairs, at = first_column + pair * 2;
      if (t >= end || at >= hidden) continue;
      const Pair* const from =
          reinterpret_cast<const Pair*>(sums + buffer * sum_vectors + turn * groups * entries * quads +
                                        pair / 2 % 2 * lanes + pair / 4) +
          pair % 2;
      Pair sum = from[0];
      for (u32 e = 1; e < groups * entries; ++e)
        GPU_UNROLL_FOR (int i = 0; i < 2; ++i) sum.v[i] += from[e * pairs].v[i];
      GPU_UNROLL_FOR (int i = 0; i < 2; ++i) sum.v[i] *= (float)a.scale;
      *reinterpret_cast<u32*>(a.grad_f + (b * a.frames + t) * row_bytes() + at * 2) =
          type == type_f16 ? pack_two<half>(sum.v[0], sum.v[1]) : pack_two<bfloat16>(sum.v[0], sum.v[1]);
    }
  }
  // Labels: the sums that the streams have of them.
  GPU_FN void put_labels(const TransducerItem& item, i64 b, u32 split, u32 first_column,
                         const float (&of_labels)[held][width]) const {
    const u32 labels = groups * warp_labels;
    if (stream < streams)
      GPU_UNROLL_FOR (int h = 0; h < held; ++h)
        GPU_UNROLL_FOR (int q = 0; q < 2; ++q) {
          const float* const x = of_labels[h] + q * 4;
          all[(stream * labels + label() + h * label_lanes) * quads + q * lanes + lane] =
              Quad{{x[0], x[1], x[2], x[3]}};
        }
    sync_threads();
    for (u32 k = thread_x(); k < item.labels * quads; k += threads) {
      const u32 u = k / quads, at = first_column + k % lanes * width + k % quads / lanes * 4;
      if (at >= hidden) continue;
      Quad sum = all[k];
      for (u32 s = 1; s < streams; ++s)
        GPU_UNROLL_FOR (int i = 0; i < 4; ++i) sum.v[i] += all[s * labels * quads + k].v[i];
      const i64 to = (b * a.labels + u) * hidden + at;
      if (a.splits > 1) {
        *reinterpret_cast<Quad*>(a.partials + (split * (a.batch * a.labels * a.hidden) + to) * 4) = sum;
      } else {
        GPU_UNROLL_FOR (int i = 0; i < 4; ++i) sum.v[i] *= (float)a.scale;
        store_values(a.grad_g, type, to, sum.v);
      }
    }
  }
  // Rows [begin, end) of those from `first` on, which have no gradient.
  GPU_FN void fill(u8* tensor, i64 first, u32 begin, u32 end, u32 first_column, const TransducerItem& item) const {
    float x[width];
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = item.otherwise(0.0f);
    for (i64 k = thread_x(); k < (i64)(end - begin) * lanes; k += threads) {
      const u32 at = first_column + (u32)(k % lanes) * width;
      if (at < hidden) store_values(tensor, type, (first + begin + k / lanes) * hidden + at, x);
    }
  }
};

template <i32 type, JointMask masking> GPU_FN void transducer_joint_backward_held(const TransducerJointBackward& a) {
  GPU_SHARED(u32, is_last, 1);
  GPU_DYNAMIC_SHARED(Words, memory);
  JointHeld<type, masking>(a, memory).run(is_last);
}
#endif
}  // namespace gpu
