// The transducer loss's third kernel (transducer_loss.h): the gradient.
#pragma once
#include "transducer_loss.h"

namespace gpu {
#if !defined(GPU_HOST)
// The gradient of a row: of every class, and what the blank and the next label have less.
template <class Math> struct RowGradient {
  Math largest, scale, of_blank, of_label;
  u32 label;  // no class where there is none

  template <i32 type> GPU_FN void set(const TransducerLossBackward& a, const TransducerItem& item,
                                      const TransducerNode& node, i64 row, const u8* x) {
    const i64 item_nodes = node.b * a.frames * a.labels, at = item_nodes + (i64)node.t * a.labels + node.u;
    const Math g = load_one<Math>(a.grad_loss, a.grad_type, node.b * a.grad_stride);
    const LogP<Math> before = log_p_of<Math>(a.alpha, at), all = log_p_of<Math>(a.beta, item_nodes);
    const LogP<Math> normalizer = a.normalizers ? log_p_of<Math>(a.normalizers, row) : LogP<Math>{};
    // Given the labels: p of going on from the node with `p`.
    const auto passing = [&](Math p, const LogP<Math>& onward) {
      return power(((before.whole + onward.whole - all.whole) + p) + (before.rest + onward.rest - all.rest));
    };
    const auto log_p = [&](i64 index) { return (load_one<Math>(x, type, index) - normalizer.whole) - normalizer.rest; };
    const bool last_frame = node.t + 1 == item.frames, last_label = node.u + 1 == item.labels;
    largest = normalizer.whole;
    scale = a.of_logits && g != Math(0) ? g * passing(-normalizer.rest, log_p_of<Math>(a.beta, at)) : Math(0);
    const LogP<Math> end{};
    of_blank = last_frame && !last_label
                   ? Math(0)
                   : g * passing(log_p(a.blank), last_frame ? end : log_p_of<Math>(a.beta, at + a.labels));
    label = ~0u;
    of_label = Math(0);
    if (last_label) return;
    const i64 next = label_of(a, node.b, node.u);
    if ((u64)next >= (u64)a.classes) {
      scale = not_a_number<Math>();
      return;
    }
    label = (u32)next;
    of_label = g * passing(log_p(next), log_p_of<Math>(a.beta, at + 1));
  }
  GPU_FN Math of(Math x) const { return of(x, largest, scale); }
  GPU_FN static Math of(Math x, Math largest, Math scale) {
    return scale == Math(0) ? Math(0) : scale * power(x - largest);
  }
  GPU_FN Math less(u32 column, u32 blank) const {
    return (column == blank ? of_blank : Math(0)) + (column == label ? of_label : Math(0));
  }

 private:
  GPU_FN static Math power(Math x) { return exp2(x * Math(log2_of_e)); }
};

// A warp takes some rows, which lie side by side: each of its lanes finds what one row's gradient takes beside x, then
// the lanes go over the rows' elements, whichever row they are of.
template <i32 type> struct TransducerGradient {
  using P = Packet<type>;
  using Math = typename P::Math;
  using Raw = typename P::Raw;
  static constexpr int ahead = 4;  // vectors of a lane at once
  static constexpr u32 line = 8;   // vectors that a prefetch brings
  static constexpr u32 width = P::width;

  const TransducerLossBackward& a;
  u32 classes;
  RowGradient<Math> own;  // of this lane's row

  GPU_FN explicit TransducerGradient(const TransducerLossBackward& a_) : a(a_), classes((u32)a_.classes), own() {}

  GPU_FN void run() {
    const u32 warps = block_size_x() / warp_size;
    const i64 stride = (i64)grid_x() * warps * a.tile_rows,
              warp = (i64)block_x() * warps + warp_uniform(thread_x() / warp_size);
    for (i64 first = warp * a.tile_rows; first < a.rows; first += stride) {
      const i64 left = a.rows - first;
      const u32 rows = left < a.tile_rows ? (u32)left : (u32)a.tile_rows;
      // The first elements are on their way while the rows' own values are.
      const u64 begin = (u64)first * classes * P::size, ahead_of = lane_id() * line * sizeof(Raw);
      if (ahead_of < (u64)rows * classes * P::size) prefetch(a.x + begin + ahead_of);
      own = lane_id() < rows ? gradient_of(first + lane_id()) : RowGradient<Math>{};
      elements(first, rows);
    }
  }

 private:
  // ---- rows -------------------------------------------------------------------------------------------------
  // The item of a row of a packed x, or one more than there are.
  GPU_FN i64 item_of(i64 row) const {
    i64 least = 0, most = a.batch;
    while (least < most) {
      const i64 middle = (least + most) / 2;
      if (reinterpret_cast<const i64*>(a.batch_offset)[middle] > row) most = middle;
      else least = middle + 1;
    }
    return least;
  }
  GPU_FN RowGradient<Math> gradient_of(i64 row) const {
    RowGradient<Math> gradient{};
    TransducerNode node(a, a.batch_offset ? 0 : row);
    if (a.batch_offset) node.b = item_of(row);
    if (node.b >= a.batch) return gradient;
    const TransducerItem item(a, node.b, 1, 1);
    if (a.batch_offset && !item.bad) {
      const i64 of_item = row - item.first, frame = small_quotient(of_item, (u32)item.stride);
      node.t = (u32)frame;
      node.u = (u32)(of_item - frame * item.stride);
    }
    if (node.t < item.frames && node.u < item.labels)
      gradient.template set<type>(a, item, node, row, a.x + row * a.classes * P::size);
    else gradient.scale = item.otherwise(Math(0));
    return gradient;
  }
  GPU_FN RowGradient<Math> of_lane(u32 lane) const {
    return {shuffle_value_from(own.largest, lane), shuffle_value_from(own.scale, lane),
            shuffle_value_from(own.of_blank, lane), shuffle_value_from(own.of_label, lane),
            shuffle_from(own.label, lane)};
  }

  // ---- elements ---------------------------------------------------------------------------------------------
  GPU_FN void elements(i64 first, u32 rows) const {
    const u8* const from = a.x + first * classes * P::size;
    u8* const to = a.grad_x + first * classes * P::size;
    const u32 all = rows * classes;
    // Vectors need x and its gradient to lie alike, and two rows at most in each.
    if (((u64)from ^ (u64)to) % 16 != 0 || classes < width) {
      for (u32 at = 0; at < all; at += warp_size) single(from, to, at + lane_id(), all);
      return;
    }
    const u32 past = (u32)((u64)to % 16) / P::size, gap = past ? width - past : 0, head = gap < all ? gap : all;
    const u32 count = (all - head) / width, tail = head + count * width;
    if (head || tail < all)
      single(from, to, lane_id() < width ? lane_id() : tail + lane_id() - width, lane_id() < width ? head : all);
    vectors(from + head * P::size, to + head * P::size, head, count);
  }
  GPU_FN void single(const u8* from, u8* to, u32 at, u32 end) const {
    const u32 r = at < end ? at / classes : 0, column = at - r * classes;
    const RowGradient<Math> row = of_lane(r);
    if (at < end)
      store_one(
          to, type, at,
          row.of(row.scale != Math(0) ? load_one<Math>(from, type, at) : Math(0)) - row.less(column, (u32)a.blank));
  }
  struct Some {
    Raw raw[ahead];
    u32 row[ahead];  // of the first element of each
  };
  GPU_FN void fetch(Some& some, const u8* from, u32 head, u32 first, u32 count, bool shared) const {
    GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) {
      const u32 v = first + k * warp_size + lane_id(), r = v < count ? (head + v * width) / classes : 0;
      bool live = shuffle_value_from(own.scale, r) != Math(0);
      if (shared) live |= shuffle_value_from(own.scale, r + 1 < warp_size ? r + 1 : r) != Math(0);
      some.row[k] = r;
      some.raw[k] = Raw{};
      if (live && v < count) some.raw[k] = reinterpret_cast<const Raw*>(from)[v];
    }
  }
  // What a fetch from there will want, a line a lane.
  GPU_FN void prefetch_some(const u8* from, u32 head, u32 first, u32 count) const {
    const u32 v = first + lane_id() * line;
    const bool there = lane_id() < ahead * warp_size / line && v < count;
    const bool live = shuffle_value_from(own.scale, there ? (head + v * width) / classes : 0) != Math(0);
    if (there && live) prefetch(from + (u64)v * sizeof(Raw));
  }
  GPU_FN void vectors(const u8* from, u8* to, u32 head, u32 count) const {
    const bool shared = head || classes % width;  // rows share vectors
    Some next;
    fetch(next, from, head, 0, count, shared);
    for (u32 first = 0; first < count; first += ahead * warp_size) {
      const Some now = next;
      prefetch_some(from, head, first + 2 * ahead * warp_size, count);
      fetch(next, from, head, first + ahead * warp_size, count, shared);
      GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) {
        const u32 v = first + k * warp_size + lane_id(), r = now.row[k], column = head + v * width - r * classes;
        const RowGradient<Math> row = of_lane(r);
        Math x[width];
        P::unpack_raw(x, now.raw[k]);
        if (shared) {
          const RowGradient<Math> after = of_lane(r + 1 < warp_size ? r + 1 : r);
          GPU_UNROLL_FOR (u32 i = 0; i < width; ++i) {
            const bool is_after = column + i >= classes;
            x[i] =
                RowGradient<Math>::of(x[i], is_after ? after.largest : row.largest, is_after ? after.scale : row.scale);
          }
          subtract(x, row, column);
          subtract(x, after, column - classes);
        } else {
          GPU_UNROLL_FOR (u32 i = 0; i < width; ++i) x[i] = row.of(x[i]);
          subtract(x, row, column);
        }
        if (v < count) reinterpret_cast<Raw*>(to)[v] = P::pack_raw(x);
      }
    }
  }
  // What the blank and the label have less, of those columns of the row that are among these from `column` on.
  GPU_FN void subtract(Math (&x)[width], const RowGradient<Math>& row, u32 column) const {
    if ((u32)a.blank - column >= width && row.label - column >= width) return;
    GPU_UNROLL_FOR (u32 i = 0; i < width; ++i) x[i] -= row.less(column + i, (u32)a.blank);
  }
};
template <i32 type> GPU_FN void transducer_loss_backward(const TransducerLossBackward& a) {
  TransducerGradient<type>(a).run();
}
#endif
}  // namespace gpu
