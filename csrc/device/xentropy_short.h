// Cross entropy of rows that fit in the registers of a warp, all of them whole vectors of 16 bytes.
//
// A warp takes consecutive rows, one after the other, while the next one's logits are on their way. What a row has one
// of (label, sums, loss) is a lane's: each lane does it for one row, for all of the warp's rows at once.
#pragma once
#include "warp.h"
#include "xentropy.h"

namespace gpu {
#if !defined(GPU_HOST)
// The rows of a warp and the vectors of a lane.
template <i32 type> struct ShortRows {
  using Row = Packet<type>;
  using Raw = typename Row::Raw;
  static constexpr int vectors = xentropy_short_vectors;
  i64 first;       // row
  i32 count, own;  // rows of the warp, none past the last; the one that is this lane's, from `first` on
  i32 end;         // vectors of a row from the lane's first on

  template <class Arguments> GPU_FN explicit ShortRows(const Arguments& a) {
    const i64 warp = (i64)block_x() * (block_size_x() / warp_size) + warp_uniform(thread_x() / warp_size);
    first = warp * a.rows_a_warp;
    const i64 left = a.rows - first;
    count = left < a.rows_a_warp ? (i32)maximum<i64>(left, 0) : a.rows_a_warp;
    own = (i32)lane_id() < count ? (i32)lane_id() : maximum(count - 1, 0);
    end = (i32)((u32)a.classes / Row::width) - (i32)lane_id();
  }
  GPU_FN bool has(int v) const { return v * warp_size < end; }
  // The lane's first vector of a row; the others lie `warp_size` apart.
  template <class Byte> GPU_FN static Byte* of_lane(Byte* row) { return row + lane_id() * (u32)sizeof(Raw); }
  // The lane's vectors of the first row. Nobody has looked at its label then: they do not wait for it.
  GPU_FN void fetch_first(Raw (&first_row)[vectors], const u8* tensor, i64 row_bytes) const {
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      first_row[v] = Raw{};
      if (has(v)) first_row[v] = reinterpret_cast<const Raw*>(of_lane(tensor + first * row_bytes))[v * warp_size];
    }
    loads_first();
  }
  // Calls work(row, its vectors) for each row. All but the first, whose vectors are there, are only read where `wanted`
  // of the lane that has the row.
  template <class Work>
  GPU_FN void each(Raw (&even)[vectors], const u8* tensor, i64 row_bytes, bool wanted, const Work& work) const {
    Raw odd[vectors];
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) odd[v] = Raw{};
    const u8* from = of_lane(tensor + (first + 1) * row_bytes);
    const auto fetch = [&](Raw(&raw)[vectors], i32 row) {
      if (row >= count) return;
      if (broadcast(wanted, (u32)row))
        GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
          if (has(v)) raw[v] = reinterpret_cast<const Raw*>(from)[v * warp_size];
      from += row_bytes;
    };
    for (i32 row = 0; row < count; row += 2) {
      fetch(odd, row + 1);
      work(row, even);
      fetch(even, row + 2);
      if (row + 1 < count) work(row + 1, odd);
    }
  }
};

template <i32 type> GPU_FN void xentropy_forward_short(const XentropyForward& a) {
  using Row = Packet<type>;
  using Rows = ShortRows<type>;
  using Raw = typename Row::Raw;
  constexpr int width = Row::width, vectors = Rows::vectors;
  const Rows rows(a);
  if (rows.count == 0) return;
  const i64 own_row = rows.first + rows.own, row_bytes = a.row_stride * Row::size;
  Raw first_row[vectors];
  rows.fetch_first(first_row, a.logits, row_bytes);
  const RowLabel label(a, own_row);
  const float of_label =
      label.kind == Label::taken ? load_one<float>(a.logits + own_row * row_bytes, type, label.index) : 0.0f;
  LogitSums<float> own;
  rows.each(first_row, a.logits, row_bytes, label.kind != Label::ignored, [&](i32 row, const Raw(&raw)[vectors]) {
    LogitSums<float> sums;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!rows.has(v)) continue;
      float x[width];
      Row::unpack_raw(x, raw[v]);
      add(sums, x);
    }
    float largest = sums.largest;
    GPU_UNROLL_FOR (int mask = warp_size / 2; mask; mask >>= 1)
      largest = max_number(largest, shuffle_xor_value(largest, mask));
    sums.sum *= power_of_e(sums.largest - largest);
    sums.largest = largest;
    warp_sum(sums.sum, sums.total);
    if (rows.own == row) own = sums;
  });
  if ((i32)lane_id() < rows.count) write_loss(a, rows.first + rows.own, label.kind, own, of_label);
}

template <i32 type> GPU_FN void xentropy_backward_short(const XentropyBackward& a) {
  using Row = Packet<type>;
  using Rows = ShortRows<type>;
  using Raw = typename Row::Raw;
  constexpr int width = Row::width, vectors = Rows::vectors;
  const Rows rows(a);
  if (rows.count == 0) return;
  const i64 own_row = rows.first + rows.own, row_bytes = a.row_stride * Row::size;
  Raw first_row[vectors];
  rows.fetch_first(first_row, a.logits, row_bytes);
  const RowLabel label(a, own_row);
  const LogitGradient<float> own(a, own_row, label.kind);
  constexpr u32 no_label = ~0u, ignored = ~1u;  // classes are fewer
  const u32 own_label = label.kind == Label::taken     ? (u32)label.index
                        : label.kind == Label::ignored ? ignored
                                                       : no_label;
  Raw* to = reinterpret_cast<Raw*>(Rows::of_lane(a.grad_logits + rows.first * a.classes * Row::size));
  rows.each(first_row, a.logits, row_bytes, label.kind != Label::ignored, [&](i32 row, const Raw(&raw)[vectors]) {
    const u32 index = broadcast(own_label, (u32)row), label_element = index % width;
    const i32 label_vector = (i32)(index / width) - (i32)lane_id();  // from the lane's first on
    LogitGradient<float> gradient = own;
    gradient.largest = broadcast_value(own.largest, (u32)row);
    gradient.scale = broadcast_value(own.scale, (u32)row);
    gradient.minus_all = broadcast_value(own.minus_all, (u32)row);
    gradient.of_label = broadcast_value(own.of_label, (u32)row);
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      if (!rows.has(v)) continue;
      float x[width] = {};
      if (index != ignored) {
        Row::unpack_raw(x, raw[v]);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = gradient(x[i]);
        if (v * warp_size == label_vector)
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] -= (u32)i == label_element ? gradient.of_label : 0.0f;
      }
      to[v * warp_size] = Row::pack_raw(x);
    }
    to += (u32)a.classes / width;
  });
}
#endif
}  // namespace gpu
