// Softmax cross entropy with label smoothing over the rows of a matrix.
//
//   loss = (1 - smoothing) (lse - logits[label]) + smoothing (lse - mean(logits)),  lse = log(sum(exp(logits)))
//
// The forward reads a row once: each thread keeps the largest logit so far, the sum of exp(logit - largest) and the sum
// of the logits, and the team merges them in a fixed order. A team is a warp (short rows), a block, or several blocks
// whose parts a second kernel merges (few long rows). The backward reads a row once and writes its gradient once.
//
// A label that is ignored (the padding index, or torch's -100) has loss and gradient 0, and its row is not read, or to
// no effect. Any other label outside [0, classes) picks nothing: its loss and its row's gradient are nan.
#pragma once
#include "exponential.h"
#include "logarithm.h"
#include "logit_team.h"
#include "packets.h"
#include "reduce.h"
#include "xentropy_arguments.h"

namespace gpu {
#if !defined(GPU_HOST)
// ---- what is known of some logits -------------------------------------------------------------------------
template <class Math> struct LogitSums;
template <> struct LogitSums<float> { float largest = -3.402823466e38f, sum = 0.0f, total = 0.0f; };
template <> struct LogitSums<double> { double largest = -1.7976931348623157e308, sum = 0.0, total = 0.0; };

template <class Math> GPU_FN Math power_of_e(Math x) { return exp2(x * Math(1.4426950408889634)); }

template <class Math> GPU_FN void merge(LogitSums<Math>& a, const LogitSums<Math>& b) {
  const Math largest = max_number(a.largest, b.largest);
  a.sum = a.sum * power_of_e(a.largest - largest) + b.sum * power_of_e(b.largest - largest);
  a.total += b.total;
  a.largest = largest;
}
template <class Math, int count> GPU_FN void add(LogitSums<Math>& sums, const Math (&x)[count]) {
  Math largest = sums.largest;
  GPU_UNROLL_FOR (int i = 0; i < count; ++i) largest = max_number(largest, x[i]);
  Math sum[2] = {sums.sum * power_of_e(sums.largest - largest), Math(0)}, total[2] = {sums.total, Math(0)};
  GPU_UNROLL_FOR (int i = 0; i < count; ++i) {
    sum[i & 1] += power_of_e(x[i] - largest);
    total[i & 1] += x[i];
  }
  sums.largest = largest;
  sums.sum = sum[0] + sum[1];
  sums.total = total[0] + total[1];
}
template <class Math> GPU_FN void warp_merge(LogitSums<Math>& sums) {
  GPU_UNROLL_FOR (int mask = warp_size / 2; mask; mask >>= 1) {
    LogitSums<Math> other;
    other.largest = shuffle_xor_value(sums.largest, mask);
    other.sum = shuffle_xor_value(sums.sum, mask);
    other.total = shuffle_xor_value(sums.total, mask);
    merge(sums, other);
  }
}

// Both sums over the warp: each half of it makes one, so that two take hardly more exchanges than one.
GPU_FN void warp_sum(float& a, float& b) {
  const bool second = lane_id() >= warp_size / 2;
  float mine = (second ? b : a) + shuffle_xor_value(second ? a : b, warp_size / 2);
  GPU_UNROLL_FOR (int mask = warp_size / 4; mask; mask >>= 1) mine += shuffle_xor_value(mine, mask);
  const float other = shuffle_xor_value(mine, warp_size / 2);
  a = second ? other : mine;
  b = second ? mine : other;
}

// ---- rows --------------------------------------------------------------------------------------------------
// A split of a row: single elements up to a multiple of 16 bytes, vectors, single elements.
template <int size, int width> struct RowParts {
  u32 head, first_vector, end_vector, tail;  // elements [0, head) and [tail, classes) are single
  bool has_head, has_tail;

  GPU_FN RowParts(const u8* row, u32 classes, u32 split, u32 splits) {
    const u32 past = (u32)((u64)row % 16) / size;
    head = past ? width - past : 0;
    if (head > classes) head = classes;
    const u32 vectors = (classes - head) / width, each = vectors / splits, more = vectors % splits;
    tail = head + vectors * width;
    first_vector = split * each + (split < more ? split : more);
    end_vector = first_vector + each + (split < more);
    has_head = split == 0;
    has_tail = split == splits - 1;
  }
};

enum class Label { taken, ignored, outside };
struct RowLabel {
  i64 index;
  Label kind;

  template <class Arguments> GPU_FN RowLabel(const Arguments& a, i64 row) {
    index =
        a.wide_labels ? reinterpret_cast<const i64*>(a.labels)[row] : (i64) reinterpret_cast<const i32*>(a.labels)[row];
    const bool ignored = index == xentropy_ignored_label || (a.has_padding && index == a.padding_index);
    kind = ignored ? Label::ignored : (u64)index < (u64)a.classes ? Label::taken : Label::outside;
  }
};

// ---- forward -----------------------------------------------------------------------------------------------
// The loss of a row of which everything is known; `of_label` is the label's logit.
template <class Math>
GPU_FN void write_loss(const XentropyForward& a, i64 row, Label kind, const LogitSums<Math>& sums, Math of_label) {
  Math loss = Math(0);
  Math* const normalizers = reinterpret_cast<Math*>(a.normalizers) + 2 * row;
  normalizers[0] = kind == Label::ignored ? Math(0) : sums.largest;
  normalizers[1] = kind == Label::ignored ? Math(1) : sums.sum;
  if (kind != Label::ignored) {
    const Math log_sum = log(sums.sum), smoothing = (Math)a.smoothing;
    loss = (Math(1) - smoothing) * (sums.largest - of_label + log_sum);
    // Not where it is 0: 0 times infinity is nan.
    if (smoothing != Math(0)) loss += smoothing * (sums.largest - sums.total / (Math)a.classes + log_sum);
    if (kind == Label::outside) loss = (Math)bit_cast<float>(0x7fc00000u);
  }
  store_one(a.losses, a.loss_type, row, loss);
}

template <i32 type> GPU_FN void xentropy_forward(const XentropyForward& a) {
  using Row = Packet<type>;
  using Math = typename Row::Math;
  constexpr int width = Row::width, most_warps = xentropy_threads / warp_size;
  constexpr int ahead = 4, together = width == 8 ? 2 : 4;  // vectors on their way; vectors added at once
  GPU_SHARED(Math, parts, 3 * most_warps);
  const LogitTeam team(a.warp_rows ? LogitTeam::log_warp : -1);
  for (i64 unit = team.first; unit < a.rows * a.splits; unit += team.stride) {
    const i64 row = unit / a.splits;
    const u32 split = (u32)(unit - row * a.splits);
    const RowLabel label(a, row);
    const u8* const begin = a.logits + row * a.row_stride * Row::size;
    LogitSums<Math> sums;
    Math of_label = Math(0);
    if (label.kind != Label::ignored) {
      if (team.rank == 0 && a.splits == 1 && label.kind == Label::taken)
        of_label = load_one<Math>(begin, type, label.index);
      const RowParts<Row::size, width> parts_of_row(begin, (u32)a.classes, split, a.splits);
      const auto add_one = [&](u32 index) {
        const Math x[1] = {load_one<Math>(begin, type, index)};
        add(sums, x);
      };
      if (parts_of_row.has_head && team.rank < parts_of_row.head) add_one(team.rank);
      const typename Row::Raw* const vectors =
          reinterpret_cast<const typename Row::Raw*>(begin + parts_of_row.head * Row::size);
      u32 v = parts_of_row.first_vector + team.rank;
      const u32 end = parts_of_row.end_vector, step = team.size;
      for (; v + (ahead - 1) * step < end; v += ahead * step) {
        typename Row::Raw raw[ahead];
        GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) raw[k] = vectors[v + k * step];
        GPU_UNROLL_FOR (int k = 0; k < ahead; k += together) {
          Math x[together * width];
          GPU_UNROLL_FOR (int t = 0; t < together; ++t) {
            Math y[width];
            Row::unpack_raw(y, raw[k + t]);
            GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[t * width + i] = y[i];
          }
          add(sums, x);
        }
      }
      typename Row::Raw raw[ahead - 1];
      GPU_UNROLL_FOR (int k = 0; k < ahead - 1; ++k)
        if (v + k * step < end) raw[k] = vectors[v + k * step];
      GPU_UNROLL_FOR (int k = 0; k < ahead - 1; ++k) {
        if (v + k * step >= end) continue;
        Math x[width];
        Row::unpack_raw(x, raw[k]);
        add(sums, x);
      }
      if (parts_of_row.has_tail && team.rank < (u32)a.classes - parts_of_row.tail)
        add_one(parts_of_row.tail + team.rank);

      warp_merge(sums);
      if (!team.is_warp) {
        const u32 warp = thread_x() / warp_size, warps = block_size_x() / warp_size;
        sync_threads();  // the row before may still be read
        if (lane_id() == 0) {
          parts[warp] = sums.largest;
          parts[most_warps + warp] = sums.sum;
          parts[2 * most_warps + warp] = sums.total;
        }
        sync_threads();
        if (warp == 0) {
          sums = LogitSums<Math>();
          if (lane_id() < warps) {
            sums.largest = parts[lane_id()];
            sums.sum = parts[most_warps + lane_id()];
            sums.total = parts[2 * most_warps + lane_id()];
          }
          warp_merge(sums);
        }
      }
    }
    if (team.rank != 0) continue;
    if (a.splits == 1) {
      write_loss(a, row, label.kind, sums, of_label);
    } else {
      Math* const partial = reinterpret_cast<Math*>(a.partials) + 3 * unit;
      partial[0] = sums.largest;
      partial[1] = sums.sum;
      partial[2] = sums.total;
    }
  }
}

// Rows of several blocks: a warp a row.
template <class Math> GPU_FN void xentropy_merge(const XentropyForward& a) {
  const LogitTeam team(LogitTeam::log_warp);
  for (i64 row = team.first; row < a.rows; row += team.stride) {
    const RowLabel label(a, row);
    LogitSums<Math> sums;
    const Math* const partials = reinterpret_cast<const Math*>(a.partials) + 3 * row * a.splits;
    for (i32 split = (i32)team.rank; split < a.splits; split += warp_size) {
      LogitSums<Math> other;
      other.largest = partials[3 * split];
      other.sum = partials[3 * split + 1];
      other.total = partials[3 * split + 2];
      merge(sums, other);
    }
    warp_merge(sums);
    if (team.rank != 0) continue;
    const Math of_label = label.kind == Label::taken
                              ? load_one<Math>(a.logits, a.logits_type, row * a.row_stride + label.index)
                              : Math(0);
    write_loss(a, row, label.kind, sums, of_label);
  }
}

// ---- backward ----------------------------------------------------------------------------------------------
// gradient = g * (softmax - smoothing / classes - (1 - smoothing) [is the label])
template <class Math> struct LogitGradient {
  Math largest, scale, minus_all, of_label;

  GPU_FN LogitGradient(const XentropyBackward& a, i64 row, Label kind) {
    const Math* const normalizers = reinterpret_cast<const Math*>(a.normalizers) + 2 * row;
    Math g = load_one<Math>(a.grad_losses, a.grad_type, row * a.grad_stride);
    if (kind == Label::outside) g = (Math)bit_cast<float>(0x7fc00000u);
    const Math smoothing = (Math)a.smoothing;
    largest = normalizers[0];
    scale = g / normalizers[1];
    minus_all = -(g * smoothing / (Math)a.classes);
    of_label = g * (Math(1) - smoothing);
  }
  GPU_FN Math operator()(Math x) const { return fma(power_of_e(x - largest), scale, minus_all); }
};

template <i32 type> GPU_FN void xentropy_backward(const XentropyBackward& a) {
  using Row = Packet<type>;
  using Math = typename Row::Math;
  using Raw = typename Row::Raw;
  constexpr int width = Row::width, ahead = 4;
  const LogitTeam team(a.warp_rows ? LogitTeam::log_warp : -1);
  for (i64 unit = team.first; unit < a.rows * a.splits; unit += team.stride) {
    const i64 row = unit / a.splits;
    const u32 split = (u32)(unit - row * a.splits);
    const RowLabel label(a, row);
    const bool ignored = label.kind == Label::ignored;
    const u8* const from = a.logits + row * a.row_stride * Row::size;
    u8* const to = a.grad_logits + row * a.classes * Row::size;
    const LogitGradient<Math> gradient(a, row, label.kind);
    const auto one = [&](u32 index) {
      Math y = Math(0);
      if (!ignored) {
        y = gradient(load_one<Math>(from, type, index));
        if (index == label.index) y -= gradient.of_label;
      }
      store_one(to, type, index, y);
    };
    // Vectors need both rows to lie alike. What is ignored is only written.
    if (!ignored && ((u64)from ^ (u64)to) % 16 != 0) {
      const u32 end = (u32)(a.classes * (split + 1) / a.splits);
      for (u32 index = (u32)(a.classes * split / a.splits) + team.rank; index < end; index += team.size) one(index);
      continue;
    }
    const RowParts<Row::size, width> parts(to, (u32)a.classes, split, a.splits);
    if (parts.has_head && team.rank < parts.head) one(team.rank);
    if (parts.has_tail && team.rank < (u32)a.classes - parts.tail) one(parts.tail + team.rank);
    const Raw* const read = reinterpret_cast<const Raw*>(from + parts.head * Row::size);
    Raw* const write = reinterpret_cast<Raw*>(to + parts.head * Row::size);
    u32 v = parts.first_vector + team.rank;
    const u32 end = parts.end_vector, step = team.size;
    if (ignored) {
      const Math zeros[width] = {};
      for (; v < end; v += step) write[v] = Row::pack_raw(zeros);
      continue;
    }
    const u32 past_head = (u32)label.index - parts.head;  // wraps where the label is in the head: no vector has it
    const u32 label_vector = label.kind == Label::taken ? past_head / width : ~0u, label_element = past_head % width;
    const auto put = [&](u32 at, const Raw& raw) {
      Math x[width];
      Row::unpack_raw(x, raw);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = gradient(x[i]);
      if (at == label_vector)
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] -= (u32)i == label_element ? gradient.of_label : Math(0);
      write[at] = Row::pack_raw(x);
    };
    for (; v + (ahead - 1) * step < end; v += ahead * step) {
      Raw raw[ahead];
      GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) raw[k] = read[v + k * step];
      GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) put(v + k * step, raw[k]);
    }
    Raw raw[ahead - 1];
    GPU_UNROLL_FOR (int k = 0; k < ahead - 1; ++k)
      if (v + k * step < end) raw[k] = read[v + k * step];
    GPU_UNROLL_FOR (int k = 0; k < ahead - 1; ++k)
      if (v + k * step < end) put(v + k * step, raw[k]);
  }
}
#endif
}  // namespace gpu
