// The joint of a transducer: output[b, t, u] = f[b, t] + g[b, u], with ReLU and dropout, over the frames and labels
// that each item has. The output is [batch][frames][labels][hidden], or packed: the items' own rows, one item behind
// another.
//
// With n the bytes of the output, the forward writes n: a thread holds a few labels' columns and a few frames'. The
// backward reads n once and sums it both ways: a warp takes a frame at a time, its threads hold the sums over frames of
// some labels, and add these labels of the frame. ReLU's mask is found again from f and g, which are small; dropout's
// is kept as bits, n / 16 bytes for two-byte elements, written once and read once. Sums have one order, whatever ran
// first. Where few items and columns leave multiprocessors idle, blocks share an item's frames: they write float sums
// over these, and the last one adds them up.
//
// Rows that no item has (padding, and the rest of a packed output) are -1, their gradients are not read. An item whose
// lengths or rows do not fit is nan: its output, and its gradients.
#pragma once
#include "exponential.h"
#include "packets.h"
#include "reduce.h"
#include "transducer_item.h"
#include "transducer_joint_arguments.h"
#include "transducer_joint_dropout.h"

namespace gpu {
#if !defined(GPU_HOST)
// ---- columns that a thread works on together ---------------------------------------------------------------
// In accesses of 16 bytes: rows begin at multiples of 16 bytes.
template <i32 type, int columns> struct JointVector {
  using P = Packet<type>;
  using Math = typename P::Math;
  static constexpr int width = columns, packets = columns / P::width, labels = joint_labels;
  static constexpr bool prefetches = false;
  struct Raw { typename P::Raw packet[packets]; };
  GPU_FN static constexpr i32 type_of(i32) { return type; }
  GPU_FN static i64 bytes(i32, i64 elements) { return elements * P::size; }
  GPU_FN static Raw load(const u8* from, i32, i64, const u8* = nullptr) {
    Raw raw;
    GPU_UNROLL_FOR (int p = 0; p < packets; ++p) raw.packet[p] = reinterpret_cast<const typename P::Raw*>(from)[p];
    return raw;
  }
  GPU_FN static void unpack(Math (&x)[columns], const Raw& raw) {
    GPU_UNROLL_FOR (int p = 0; p < packets; ++p) {
      Math y[P::width];
      P::unpack_raw(y, raw.packet[p]);
      GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) x[p * P::width + i] = y[i];
    }
  }
  GPU_FN static void store(u8* to, i32, i64, const Math (&x)[columns]) {
    GPU_UNROLL_FOR (int p = 0; p < packets; ++p) {
      Math y[P::width];
      GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) y[i] = x[p * P::width + i];
      reinterpret_cast<typename P::Raw*>(to)[p] = P::pack_raw(y);
    }
  }
};
// One by one: `count` of them are in the row.
template <class Math_, int columns> struct JointElements {
  using Math = Math_;
  static constexpr int width = columns, labels = joint_labels_of_elements;
  static constexpr bool prefetches = false;
  struct Raw { Math x[columns]; };
  GPU_FN static i32 type_of(i32 type) { return type; }
  GPU_FN static i64 bytes(i32 type, i64 elements) { return elements * bytes_of(type); }
  GPU_FN static Raw load(const u8* from, i32 type, i64 count, const u8* = nullptr) {
    Raw raw{};
    GPU_UNROLL_FOR (int i = 0; i < columns; ++i)
      if (i < count) raw.x[i] = load_one<Math>(from, type, i);
    return raw;
  }
  GPU_FN static void unpack(Math (&x)[columns], const Raw& raw) {
    GPU_UNROLL_FOR (int i = 0; i < columns; ++i) x[i] = raw.x[i];
  }
  GPU_FN static void store(u8* to, i32 type, i64 count, const Math (&x)[columns]) {
    GPU_UNROLL_FOR (int i = 0; i < columns; ++i)
      if (i < count) store_one(to, type, i, x[i]);
  }
};

// ---- forward -----------------------------------------------------------------------------------------------
template <class Access, bool dropout> struct JointForward {
  using Math = typename Access::Math;
  using Raw = typename Access::Raw;
  static constexpr int width = Access::width;

  const TransducerJointForward& a;
  u32 lane, group, groups, parts;
  u64 key = 0;  // with dropout; what is not above `limit` is dropped, too
  Math scale = Math(1), limit = Math(0);

  GPU_FN explicit JointForward(const TransducerJointForward& a_) : a(a_) {
    if constexpr (dropout) {
      const u64 seed = *reinterpret_cast<const u64*>(a.seed);
      key = (u64)warp_uniform((u32)(seed >> 32)) << 32 | warp_uniform((u32)seed);
      scale = (Math)a.scale;
      limit = a.relu ? Math(0) : (Math)bit_cast<float>(0x7fc00000u);  // nothing is below, nor equal
    }
    lane = thread_x() & (u32)(a.lanes - 1);
    group = thread_x() / (u32)a.lanes;
    groups = block_size_x() / (u32)a.lanes;
    parts = tiles_of(a.hidden, width);
  }
  GPU_FN const u8* row_of(const u8* tensor, i64 row, u32 part) const {
    return tensor + Access::bytes(a.type, row * a.hidden + (i64)part * width);
  }
  GPU_FN void fill(i64 row, u32 part, Math value) const {
    Math x[width];
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = value;
    Access::store(const_cast<u8*>(row_of(a.output, row, part)), a.type, a.hidden - (i64)part * width, x);
    if constexpr (dropout) a.mask[row * parts + part] = 0;
  }
  // Rows [from, to) by `turns` groups of threads, of which this is one.
  GPU_FN void fill_rows(i64 from, i64 to, i64 turn, i64 turns, Math value) const {
    for (i64 row = from + turn; row < to; row += turns)
      for (u32 part = lane; part < parts; part += (u32)a.lanes) fill(row, part, value);
  }

  GPU_FN void run() const {
    const u32 label_tiles = tiles_of(a.labels, joint_tile_labels),
              frame_tiles = tiles_of(a.frames, groups * joint_tile_frames<dropout>);
    const i64 units = a.batch * frame_tiles * label_tiles;
    for (i64 unit = block_x(); unit < units; unit += grid_x()) {
      const i64 tile = small_quotient(unit, label_tiles), b = small_quotient(tile, frame_tiles);
      const u32 first_label = (u32)(unit - tile * label_tiles) * joint_tile_labels;
      const u32 first_frame = (u32)(tile - b * frame_tiles) * groups * joint_tile_frames<dropout> + group;
      work(b, first_frame, first_label);
      if (!a.batch_offset || unit != b * frame_tiles * label_tiles) continue;
      const TransducerItem item(a, b);
      if (item.bad)
        fill_rows(item.first < 0 ? 0 : item.first, item.end > a.rows ? a.rows : item.end, group, groups,
                  item.otherwise(Math(0)));
    }
    if (a.batch_offset) {
      const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0;
      fill_rows(end < 0 ? 0 : end, a.rows, (i64)block_x() * groups + group, (i64)grid_x() * groups, Math(-1));
    }
  }

 private:
  // The sums of one frame and `labels` labels, the first of which has that row.
  template <bool all> GPU_FN void add(const Math (&fx)[width], const Raw (&gs)[joint_tile_labels], i64 row, u32 part,
                                      u32 labels, i64 count) const {
    const Math least = a.relu ? Math(0) : (Math)bit_cast<float>(0xff800000u);
    u8* const to = const_cast<u8*>(row_of(a.output, row, part));
    const u32 row_bytes = (u32)Access::bytes(a.type, a.hidden);
    GPU_UNROLL_FOR (int j = 0; j < (int)joint_tile_labels; ++j) {
      if (!all && (u32)j >= labels) continue;
      Math x[width];
      Access::unpack(x, gs[j]);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = max_or_nan(x[i] + fx[i], least);
      Access::store(to + (u64)j * row_bytes, a.type, count, x);
    }
  }
  // With dropout. Random numbers are most of the work, so two labels' are made beside each other.
  GPU_FN void add_and_drop(const PhiloxKeys& keys, const Math (&fx)[width], const u8* g, i64 row, u32 part, u32 labels,
                           i64 count) const {
    const u32 row_bytes = (u32)Access::bytes(a.type, a.hidden);
    i64 at = row * parts + part;
    u8* to = const_cast<u8*>(row_of(a.output, row, part));
    u32 left = labels;
    for (; left > 1; left -= 2) add_and_drop_some<2>(keys, fx, g, to, at, row_bytes, count);
    if (left) add_and_drop_some<1>(keys, fx, g, to, at, row_bytes, count);
  }
  template <int some> GPU_FN void add_and_drop_some(const PhiloxKeys& keys, const Math (&fx)[width], const u8*& g,
                                                    u8*& to, i64& at, u32 row_bytes, i64 count) const {
    Raw gs[some];
    GPU_UNROLL_FOR (int k = 0; k < some; ++k) gs[k] = Access::load(g + k * (u64)row_bytes, a.type, count);
    GPU_UNROLL_FOR (int k = 0; k < some; ++k) {
      Math x[width];
      Access::unpack(x, gs[k]);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] += fx[i];
      u32 bits = drop_eight(x, philox(keys, (u64)(at + k * parts)), a.keep, limit, scale);
      if (count < width) bits &= (1u << count) - 1;
      a.mask[at + k * parts] = (u8)bits;
      Access::store(to + k * (u64)row_bytes, a.type, count, x);
    }
    g += some * (u64)row_bytes;
    to += some * (u64)row_bytes;
    at += some * parts;
  }
  GPU_FN void work(i64 b, u32 first_frame, u32 first_label) const {
    const PhiloxKeys keys = held_keys(key);
    const u32 row_bytes = (u32)Access::bytes(a.type, a.hidden);
    for (u32 part = lane; part < parts; part += (u32)a.lanes) {
      const i64 count = a.hidden - (i64)part * width;
      // What does not depend on the lengths is on its way while they are.
      const u8* const g = row_of(a.g, b * a.labels + first_label, part);
      Raw gs[joint_tile_labels] = {};
      if constexpr (!dropout)
        GPU_UNROLL_FOR (int j = 0; j < (int)joint_tile_labels; ++j)
          if (first_label + j < a.labels) gs[j] = Access::load(g + (u64)j * row_bytes, a.type, count);
      Raw next{};
      if (first_frame < a.frames) next = Access::load(row_of(a.f, b * a.frames + first_frame, part), a.type, count);
      const TransducerItem item(a, b);
      const u32 frames = a.batch_offset ? item.frames : (u32)a.frames,
                labels = a.batch_offset ? item.labels : (u32)a.labels;
      const u32 after_frames = first_frame + groups * joint_tile_frames<dropout>,
                end = after_frames < frames ? after_frames : frames;
      const u32 left = first_label < item.labels ? item.labels - first_label : 0,
                own = left < joint_tile_labels ? left : joint_tile_labels;
      for (u32 t = first_frame; t < end; t += groups) {
        const bool has = t < item.frames && own;
        if (has) {
          Math fx[width];
          Access::unpack(fx, next);
          const i64 row = item.row(t, first_label);
          if constexpr (dropout) {
            add_and_drop(keys, fx, g, row, part, own, count);
          } else {
            // Without questions where all are there, as mostly.
            if (own == joint_tile_labels) add<true>(fx, gs, row, part, own, count);
            else add<false>(fx, gs, row, part, own, count);
          }
        }
        if (t + groups < end) next = Access::load(row_of(a.f, b * a.frames + t + groups, part), a.type, count);
        for (u32 u = first_label + (has ? own : 0); u < first_label + joint_tile_labels && u < labels; ++u)
          fill(item.row(t, u), part, item.otherwise(Math(-1)));
      }
    }
  }
};

// ---- backward ----------------------------------------------------------------------------------------------
// Adds x to both sums where a is above b, or either is a nan.
template <class Math> GPU_FN void add_above(Math a, Math b, Math x, Math& first, Math& second) {
  x = a <= b ? Math(0) : x;
  first += x;
  second += x;
}
#if defined(GPU_CUDA)
// Three instructions instead of four: the backward of halves would else issue more than its memory's speed allows.
template <> GPU_FN void add_above<float>(float a, float b, float x, float& first, float& second) {
  asm("{\n\t.reg .pred above;\n\tsetp.gtu.f32 above, %2, %3;\n\t@above add.f32 %0, %0, %4;\n\t@above add.f32 %1, %1, "
      "%4;\n\t}"
      : "+f"(first), "+f"(second)
      : "f"(a), "f"(b), "f"(x));
}
#endif

// Gradient of g: what the blocks that share an item's frames have written of `columns` columns, added up. Several
// elements' loads wait together, and go to several sums: in one, most additions would round to its last bit.
template <class Math> GPU_FN void add_splits(const TransducerJointBackward& a, const TransducerItem& item, i64 b,
                                             u32 first_column, u32 columns) {
  constexpr u32 at_once = 2, sums = 8;
  const u32 splits = tiles_of(item.frames, (u32)a.tile_frames);
  const i64 live = item.frames ? (i64)item.labels * columns : 0, split_size = a.batch * a.labels * a.hidden;
  for (i64 first = thread_x(); first < live; first += block_size_x() * at_once) {
    Math some[at_once][sums] = {};
    i64 at[at_once];
    GPU_UNROLL_FOR (u32 n = 0; n < at_once; ++n) {
      const i64 k = first + n * block_size_x(), u = small_quotient(k, columns),
                column = first_column + (k - u * columns);
      at[n] = k < live && column < a.hidden ? (b * a.labels + u) * a.hidden + column : -1;
    }
    for (u32 s = 0; s < splits; s += sums)
      GPU_UNROLL_FOR (u32 i = 0; i < sums; ++i)
        GPU_UNROLL_FOR (u32 n = 0; n < at_once; ++n)
          if (s + i < splits && at[n] >= 0)
            some[n][i] += load_coherent(reinterpret_cast<const Math*>(a.partials) + (s + i) * split_size + at[n]);
    GPU_UNROLL_FOR (u32 half = sums / 2; half; half /= 2)
      GPU_UNROLL_FOR (u32 i = 0; i < half; ++i)
        GPU_UNROLL_FOR (u32 n = 0; n < at_once; ++n) some[n][i] += some[n][i + half];
    GPU_UNROLL_FOR (u32 n = 0; n < at_once; ++n)
      if (at[n] >= 0) store_one(a.grad_g, a.type, at[n], some[n][0] * (Math)a.scale);
  }
}

enum class JointMask { none, relu, bits };

// A unit is a slab of columns of some of an item's frames: a block's. A warp's lanes are `column_lanes` side by side on
// a row; beside them, other labels of the same frame.
template <class Access, int column_lanes, JointMask masking> struct JointBackward {
  using Math = typename Access::Math;
  using Raw = typename Access::Raw;
  static constexpr int width = Access::width, slab = column_lanes * width;
  static constexpr int label_lanes = warp_size / column_lanes, labels = Access::labels;
  static constexpr int held = labels / label_lanes;    // labels of a thread
  static constexpr u32 all_lanes = warp_size * width;  // columns of all lanes of a warp
  static constexpr u32 of_g = masking == JointMask::relu ? labels * slab : 0, of_warps = joint_backward_threads * width;
  static constexpr u32 shared_values = of_g > of_warps ? of_g : of_warps;

  const TransducerJointBackward& a;
  Math* shared;  // shared_values: g of the labels that are held, negative; then the sums of each warp
  Math* sums;    // [tile_frames][slab]: sums over the labels so far
  u32 warp, warps, column_lane, label_lane;

  GPU_FN JointBackward(const TransducerJointBackward& a_, Math* shared_, Math* sums_)
      : a(a_), shared(shared_), sums(sums_) {
    warp = warp_uniform(thread_x() / warp_size);
    warps = block_size_x() / warp_size;
    column_lane = lane_id() % column_lanes;
    label_lane = lane_id() / column_lanes;
  }

  GPU_FN void run(u32 (&is_last)[1]) {
    const u32 slabs = tiles_of(a.hidden, slab), splits = (u32)a.splits;
    const i64 units = a.batch * splits * slabs;
    for (i64 unit = block_x(); unit < units; unit += grid_x()) {
      const i64 rest = small_quotient(unit, slabs), b = small_quotient(rest, splits);
      const u32 split = (u32)(rest - b * splits), first_column = (u32)(unit - rest * slabs) * slab;
      const TransducerItem item(a, b);
      const u32 begin = split * (u32)a.tile_frames, up_to = begin + (u32)a.tile_frames,
                end = up_to < (u32)a.frames ? up_to : (u32)a.frames;
      const u32 live_end = item.labels == 0 ? begin : end < item.frames ? end : item.frames;
      if (begin < live_end)
        for (u32 label = 0; label < item.labels; label += labels)
          add_labels(item, b, split, begin, live_end, label, first_column);
      // What has no gradient.
      const i64 column = first_column + column_lane * width;
      Math nothing[width];
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) nothing[i] = item.otherwise(Math(0));
      if (label_lane == 0 && column < a.hidden)
        for (u32 t = (live_end > begin ? live_end : begin) + warp; t < end; t += warps)
          Access::store(a.grad_f + Access::bytes(a.type, (b * a.frames + t) * a.hidden + column), a.type,
                        a.hidden - column, nothing);
      const u32 live_labels = item.frames ? item.labels : 0;
      const bool last =
          splits == 1 ||
          is_last_of(reinterpret_cast<u32*>(a.counters) + b * slabs + (u32)(unit - rest * slabs), splits, is_last);
      if (last && splits > 1) add_splits<Math>(a, item, b, first_column, slab);
      if (last) fill_labels(b, first_column, live_labels, nothing[0]);
    }
  }

 private:
  GPU_FN const u8* end_of(const u8* tensor, i64 rows) const { return tensor + Access::bytes(a.type, rows * a.hidden); }
  // Adds up frames [begin, end) of the labels from `label` on, both ways.
  GPU_FN void add_labels(const TransducerItem& item, i64 b, u32 split, u32 begin, u32 end, u32 label,
                         u32 first_column) {
    const i64 column = first_column + column_lane * width, count = a.hidden - column;
    const bool has = count > 0, last = label + labels >= item.labels;
    const u32 mask_stride = ((u32)a.hidden + 7) / 8;
    if constexpr (masking == JointMask::relu) {
      sync_threads();
      // Frames go by a quad of columns of all lanes at a time, so that no two lanes meet in a bank.
      for (u32 k = thread_x(); k < (u32)(labels * column_lanes); k += block_size_x()) {
        const u32 u = label + k / column_lanes, lane = k % column_lanes;
        const i64 from = first_column + lane * width;
        Math x[width] = {};
        if (u < item.labels && from < a.hidden)
          Access::unpack(x, Access::load(a.g + Access::bytes(a.type, (b * a.labels + u) * a.hidden + from), a.type,
                                         a.hidden - from, end_of(a.g, a.batch * a.labels)));
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) shared[g_at(k / column_lanes, lane, i)] = -x[i];
      }
      sync_threads();
    }
    Math of_labels[held][width] = {};
    // Labels that this thread has of those, label_lanes apart.
    const i32 mine = has ? ((i32)(item.labels - label) - (i32)label_lane + label_lanes - 1) / label_lanes : 0;
    const i64 first_row = item.row(begin + warp, label + label_lane), frame_rows = warps * item.stride;
    const u8* from = a.grad_output + Access::bytes(a.type, first_row * a.hidden + column);
    const i64 frame_bytes = Access::bytes(a.type, frame_rows * a.hidden);
    // In 32 bits: a thread's labels are one multiplication away.
    const u32 label_bytes = (u32)Access::bytes(a.type, label_lanes * a.hidden),
              own_bytes = (u32)Access::bytes(a.type, warps * a.hidden);
    const i64 first_f = (b * a.frames + begin + warp) * a.hidden + column;
    const u8* f = a.f + Access::bytes(a.type, first_f);
    const u8* bits_from = a.mask + first_row * mask_stride + column / 8;
    const u8 *const f_end = end_of(a.f, a.batch * a.frames), *const grad_end = end_of(a.grad_output, a.rows);
    Math* so_far = sums + warp * slab + column_lane * width;
    u8* grad_f = a.grad_f + Access::bytes(a.type, first_f);
    for (u32 t = begin + warp; t < end; t += warps) {
      Raw raw[held] = {}, f_raw{};
      u32 bits[held] = {};
      if constexpr (masking == JointMask::relu) {
        if (has) f_raw = Access::load(f, a.type, count, f_end);
        f += own_bytes;
      }
      GPU_UNROLL_FOR (int h = 0; h < held; ++h) {
        if (h >= mine) continue;
        raw[h] = Access::load(from + (u64)h * label_bytes, a.type, count, grad_end);
        if constexpr (masking == JointMask::bits)
          bits[h] = (u32)bits_from[(u64)h * (label_lanes * mask_stride)] >> (column % 8);
      }
      from += frame_bytes;
      // The lanes at both ends of a row's columns fetch the next frame's.
      if (Access::prefetches && t + warps < end && (column_lane == 0 || column_lane == column_lanes - 1))
        GPU_UNROLL_FOR (int h = 0; h < held; ++h)
          if (h < mine) prefetch(from + (u64)h * label_bytes);
      if constexpr (masking == JointMask::bits) bits_from += frame_rows * mask_stride;
      loads_first();
      Math fx[width], of_frame[width] = {};
      if constexpr (masking == JointMask::relu) Access::unpack(fx, f_raw);
      GPU_UNROLL_FOR (int h = 0; h < held; ++h) {
        Math x[width], minus_g[width];
        Access::unpack(x, raw[h]);
        if constexpr (masking == JointMask::relu) read_g(minus_g, label_lane + h * label_lanes);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
          if constexpr (masking == JointMask::relu) {
            add_above(fx[i], minus_g[i], x[i], of_frame[i], of_labels[h][i]);
          } else {
            if constexpr (masking == JointMask::bits) x[i] = bits[h] >> i & 1 ? x[i] : Math(0);
            of_frame[i] += x[i];
            of_labels[h][i] += x[i];
          }
        }
      }
      GPU_UNROLL_FOR (int mask = column_lanes; mask < warp_size; mask <<= 1)
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) of_frame[i] += shuffle_xor_value(of_frame[i], mask);
      if (label_lane == 0 && has) {
        // A frame is one warp's whatever the label, so nobody else comes here.
        if (label)
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) of_frame[i] += so_far[i];
        if (last) {
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) of_frame[i] *= (Math)a.scale;
          Access::store(grad_f, a.type, count, of_frame);
        } else {
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) so_far[i] = of_frame[i];
        }
      }
      so_far += warps * slab;
      grad_f += own_bytes;
    }
    // A loop that stays one, with one branch taken in it: unrolled, it would be most of the kernel's code.
    const u32 rest = item.labels - label, rounds = rest < (u32)labels ? (rest + label_lanes - 1) / label_lanes : held;
    for (u32 round = 0; round < rounds; ++round) {
      sync_threads();
      GPU_UNROLL_FOR (int h = 0; h < held; ++h)
        if (round == (u32)h)
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) shared[warp * all_lanes + lane_id() * width + i] = of_labels[h][i];
      sync_threads();
      for (u32 k = thread_x(); k < all_lanes; k += block_size_x()) {
        const u32 lane = k / width, u = label + lane / column_lanes + round * label_lanes;
        const i64 to = first_column + lane % column_lanes * width + k % width;
        if (u >= item.labels || to >= a.hidden) continue;
        Math sum = shared[k];
        for (u32 w = 1; w < warps; ++w) sum += shared[w * all_lanes + k];
        const i64 at = (b * a.labels + u) * a.hidden + to;
        if (a.splits == 1) store_one(a.grad_g, Access::type_of(a.type), at, sum * (Math)a.scale);
        else reinterpret_cast<Math*>(a.partials)[split * (a.batch * a.labels * a.hidden) + at] = sum;
      }
    }
  }
  // Labels from `from` on, which have no gradient.
  GPU_FN void fill_labels(i64 b, u32 first_column, u32 from, Math nothing) const {
    for (i64 k = (i64)from * slab + thread_x(); k < a.labels * slab; k += block_size_x()) {
      const i64 to = first_column + k % slab;
      if (to < a.hidden)
        store_one(a.grad_g, Access::type_of(a.type), (b * a.labels + k / slab) * a.hidden + to, nothing);
    }
  }
  // Where column i of a lane of label u lies: four columns of a lane together, those of the lanes side by side.
  GPU_FN static u32 g_at(u32 u, u32 lane, int i) {
    constexpr int quad = width < 4 ? width : 4;
    return u * slab + (i / quad * column_lanes + lane) * quad + i % quad;
  }
  GPU_FN void read_g(Math (&x)[width], u32 u) const {
    constexpr int quad = width < 4 ? width : 4;
    GPU_UNROLL_FOR (int q = 0; q < width / quad; ++q) {
      const Vector<Math, quad> four =
          *reinterpret_cast<const Vector<Math, quad>*>(shared + g_at(u, column_lane, q * quad));
      GPU_UNROLL_FOR (int i = 0; i < quad; ++i) x[q * quad + i] = four.v[i];
    }
  }
};

template <class Access, bool dropout> GPU_FN void transducer_joint_forward(const TransducerJointForward& a) {
  JointForward<Access, dropout>(a).run();
}
template <class Access, int column_lanes, JointMask masking> GPU_FN void transducer_joint_backward(
    const TransducerJointBackward& a) {
  using Work = JointBackward<Access, column_lanes, masking>;
  using Math = typename Access::Math;
  using Four = Vector<Math, 4>;  // for its alignment
  GPU_SHARED(Four, shared, (Work::shared_values + 3) / 4);
  GPU_SHARED(u32, is_last, 1);
  GPU_DYNAMIC_SHARED(Math, sums);
  Work(a, reinterpret_cast<Math*>(&shared[0]), sums).run(is_last);
}
#endif
}  // namespace gpu
