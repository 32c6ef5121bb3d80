// The transducer loss's first kernel (transducer_loss.h): of each row the logarithm of its sum of exponentials, and of
// each node log p of the edges that lead on.
#pragma once
#include "transducer_loss.h"

namespace gpu {
#if !defined(GPU_HOST)
// Of some logits: the largest, and the sum of exp(logit - largest).
template <class Math> struct LogSum {
  static constexpr Math least = sizeof(Math) == 8 ? Math(-1.7976931348623157e308) : Math(-3.402823466e38);
  Math largest = least, sum = Math(0);

  GPU_FN void rise_to(Math most) {
    sum *= power(largest - most);
    largest = most;
  }
  template <int count> GPU_FN void add(const Math (&x)[count]) {
    constexpr int ways = 4;
    Math most = largest, sums[ways] = {};
    GPU_UNROLL_FOR (int i = 0; i < count; ++i) most = max_number(most, x[i]);
    rise_to(most);
    GPU_UNROLL_FOR (int i = 0; i < count; ++i) sums[i % ways] += power(x[i] - most);
    sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  // The elements of some vectors, of which `most` is the largest.
  template <class P, int count> GPU_FN void add_vectors(const typename P::Raw (&raw)[count], Math most) {
    Math sums[P::width] = {};
    rise_to(max_number(largest, most));
    GPU_UNROLL_FOR (int k = 0; k < count; ++k) {
      Math x[P::width];
      P::unpack_raw(x, raw[k]);
      GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) sums[i] += power(x[i] - largest);
    }
    GPU_UNROLL_FOR (int i = 1; i < P::width; ++i) sums[0] += sums[i];
    sum += sums[0];
  }
  // Over so many threads side by side, a power of two within a warp.
  GPU_FN void merge_lanes(u32 lanes) {
    Math most = largest;
    for (int mask = (int)lanes / 2; mask; mask >>= 1) most = max_number(most, shuffle_xor_value(most, mask));
    rise_to(most);
    for (int mask = (int)lanes / 2; mask; mask >>= 1) sum += shuffle_xor_value(sum, mask);
  }

 private:
  GPU_FN static Math power(Math x) { return exp2(x * Math(log2_of_e)); }
};

// The largest element of some vectors; nans do not count.
template <i32 type, int count> GPU_FN typename Packet<type>::Math largest_element(
    const typename Packet<type>::Raw (&raw)[count]) {
  using P = Packet<type>;
#if defined(GPU_CUDA) && __CUDA_ARCH__ >= 800
  if constexpr (P::width == 8) {
    Words most = raw[0];
    const auto rise = [](u32& to, u32 x) {
      if constexpr (type == type_f16) asm("max.f16x2 %0, %0, %1;" : "+r"(to) : "r"(x));
      else asm("max.bf16x2 %0, %0, %1;" : "+r"(to) : "r"(x));
    };
    GPU_UNROLL_FOR (int k = 1; k < count; ++k)
      GPU_UNROLL_FOR (int i = 0; i < 4; ++i) rise(most.v[i], raw[k].v[i]);
    rise(most.v[0], most.v[1]);
    rise(most.v[2], most.v[3]);
    rise(most.v[0], most.v[2]);
    float x[8];
    P::unpack_raw(x, most);
    return max_number(x[0], x[1]);
  }
#endif
  typename P::Math most = minus_infinity<typename P::Math>();
  GPU_UNROLL_FOR (int k = 0; k < count; ++k) {
    typename P::Math x[P::width];
    P::unpack_raw(x, raw[k]);
    GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) most = max_number(most, x[i]);
  }
  return most;
}

// The vectors of memory that a row of x lies in; it may share the first and the last with other rows.
template <i32 type> struct RowVectors {
  using P = Packet<type>;
  using Math = typename P::Math;
  using Raw = typename P::Raw;
  const u8* first;
  u32 past, count;  // elements before the row in the first vector; vectors, none where there is no row
  bool inside;      // all of the vectors are x's

  GPU_FN static RowVectors of(const TransducerLossForward& a, i64 row) {
    const u8* const at = a.x + row * a.classes * P::size;
    const u32 bytes = (u32)((u64)at % 16), past = bytes / P::size;
    const u32 count = row < 0 ? 0 : (past + (u32)a.classes + P::width - 1) / P::width;
    const u8 *const first = at - bytes, *const end = a.x + a.rows * a.classes * P::size;
    return {first, past, count, first >= a.x && first + (u64)count * 16 <= end};
  }
  GPU_FN Raw load(u32 v, u32 elements) const {
    if (inside) return reinterpret_cast<const Raw*>(first)[v];
    Math x[P::width];
    GPU_UNROLL_FOR (int i = 0; i < P::width; ++i)
      x[i] = has(v, i, elements) ? load_one<Math>(first, type, (i64)v * P::width + i) : Math(0);
    return P::pack_raw(x);
  }
  GPU_FN bool has(u32 v, int i, u32 elements) const { return v * P::width + (u32)i - past < elements; }
  // Whether vectors v, v + step, .. up to v + last hold elements of the row alone.
  GPU_FN bool whole(u32 v, u32 last, u32 elements) const {
    return (v > 0 || past == 0) && (v + last + 1) * P::width <= past + elements;
  }
};

template <i32 type> struct TransducerEmissions {
  using P = Packet<type>;
  using Math = typename P::Math;
  using Raw = typename P::Raw;
  static constexpr int ahead = 4;   // vectors of a lane at once
  static constexpr u32 line = 128;  // bytes that a prefetch brings
  const TransducerLossForward& a;
  u32 size, rank, teams;  // lanes that share a row; which this is; teams of them in a warp
  bool whole;             // rows are whole vectors, and all lanes share each

  GPU_FN explicit TransducerEmissions(const TransducerLossForward& a_)
      : a(a_), size(1u << a_.log_lanes), rank(lane_id() & (size - 1)), teams(warp_size >> a_.log_lanes),
        whole(teams == 1 && a_.classes % P::width == 0 && (u64)a_.x % 16 == 0) {}

  // A warp takes some nodes: each lane has one, and all its lanes go over these nodes' rows together.
  GPU_FN void run() const {
    const u32 warps = block_size_x() / warp_size;
    const i64 units = a.batch * a.frames * a.labels, stride = (i64)grid_x() * warps * a.tile_rows;
    const i64 warp = (i64)block_x() * warps + warp_uniform(thread_x() / warp_size);
    for (i64 first = warp * a.tile_rows; first < units; first += stride) {
      const i64 unit = first + lane_id();
      const bool there = lane_id() < (u32)a.tile_rows && unit < units;
      const TransducerNode node(a, there ? unit : first);
      const TransducerItem item(a, node.b, 1, 1);
      const bool has = there && node.t < item.frames && node.u < item.labels;
      const i64 row = has ? item.row(node.t, node.u) : -1;
      LogP<Math> normalizer{};
      if (a.normalizers) normalizer = whole ? normalizer_of_whole(row) : normalizer_of(row);
      if (has) put(node, item.labels, row, normalizer);
      else if (there) put_nothing(unit);
    }
    // The rest of a packed x has no logarithms.
    if (!a.normalizers || !a.batch_offset) return;
    const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0;
    for (i64 row = (end < 0 ? 0 : end) + (i64)block_x() * block_size_x() + thread_x(); row < a.rows;
         row += (i64)grid_x() * block_size_x())
      reinterpret_cast<LogP<Math>*>(a.normalizers)[row] = LogP<Math>{};
  }

 private:
  // Of this lane's row, or of none: -1. A team takes a row at a time, the next one being on its way.
  GPU_FN LogP<Math> normalizer_of(i64 row) const {
    const u32 lane = lane_id(), rounds = tiles_of(a.tile_rows, teams);
    const auto row_of = [&](u32 round) {
      const u32 from = round * teams + (lane >> a.log_lanes);
      const u32 low = shuffle_from((u32)row, from), high = shuffle_from((u32)((u64)row >> 32), from);
      return RowVectors<type>::of(a, (i64)((u64)high << 32 | low));
    };
    LogSum<Math> mine;
    Raw next[ahead] = {};
    RowVectors<type> now = row_of(0);
    fetch(next, now, rank);
    for (u32 round = 0; round < rounds; ++round) {
      RowVectors<type> then = row_of(round + 1 < rounds ? round + 1 : round);
      if (round + 1 == rounds) then.count = 0;
      // What comes after the next ones; mostly their rows lie side by side.
      const u8* const far = then.first + (i64)a.classes * P::size * teams + lane * line;
      if (then.count && lane * line < teams * (u32)a.classes * P::size && far < a.x + a.rows * a.classes * P::size)
        prefetch(far);
      LogSum<Math> sums;
      for (u32 v = rank, left = tiles_of(now.count, ahead * size); left; v += ahead * size) {
        Raw raw[ahead];
        GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) raw[k] = next[k];
        const bool more = --left != 0;
        if (more) fetch(next, now, v + ahead * size);
        else fetch(next, then, rank);
        add(sums, now, v, raw);
      }
      if (now.count == 0) fetch(next, then, rank);
      sums.merge_lanes(size);
      const u32 from = (lane & (teams - 1)) << a.log_lanes;
      const Math largest = shuffle_value_from(sums.largest, from), sum = shuffle_value_from(sums.sum, from);
      if (lane / teams == round) mine.largest = largest, mine.sum = sum;
      now = then;
    }
    return {mine.largest, log(mine.sum)};
  }
  // The same: nothing needs to be asked of a vector but whether the row has it.
  GPU_FN LogP<Math> normalizer_of_whole(i64 row) const {
    const u32 count = (u32)a.classes / P::width, rows = (u32)a.tile_rows;
    const u64 end = (u64)(a.x + a.rows * a.classes * P::size);
    const auto row_of = [&](u32 round) -> const Raw* {
      const u32 low = shuffle_from((u32)row, round), high = shuffle_from((u32)((u64)row >> 32), round);
      const i64 found = (i64)((u64)high << 32 | low);
      return found < 0 ? nullptr : reinterpret_cast<const Raw*>(a.x + found * a.classes * P::size);
    };
    LogSum<Math> mine;
    Raw next[ahead] = {};
    const Raw* then = row_of(0);
    fetch_whole(next, then, 0, count);
    for (u32 round = 0; round < rows; ++round) {
      const Raw* const now = then;
      then = round + 1 < rows ? row_of(round + 1) : nullptr;
      // What comes after the next ones; mostly their rows lie side by side.
      for (u32 v = lane_id() * line / 16; then && v < count; v += warp_size * line / 16)
        if ((u64)(then + count + v) < end) prefetch(then + count + v);
      LogSum<Math> sums;
      for (u32 first = 0; now && first < count; first += ahead * warp_size) {
        Raw raw[ahead];
        GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) raw[k] = next[k];
        if (first + ahead * warp_size < count) fetch_whole(next, now, first + ahead * warp_size, count);
        else fetch_whole(next, then, 0, count);
        sums.template add_vectors<P>(raw, largest_element<type>(raw));
      }
      if (!now) fetch_whole(next, then, 0, count);
      sums.merge_lanes(warp_size);
      if (lane_id() == round) mine = sums;
    }
    return {mine.largest, log(mine.sum)};
  }
  // -inf where the row has no vector.
  GPU_FN static void fetch_whole(Raw (&raw)[ahead], const Raw* row, u32 first, u32 count) {
    Math nothing[P::width];
    GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) nothing[i] = minus_infinity<Math>();
    GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) {
      const u32 v = first + k * warp_size + lane_id();
      raw[k] = row && v < count ? row[v] : P::pack_raw(nothing);
    }
  }
  GPU_FN void fetch(Raw (&raw)[ahead], const RowVectors<type>& row, u32 v) const {
    GPU_UNROLL_FOR (int k = 0; k < ahead; ++k)
      if (v + k * size < row.count) raw[k] = row.load(v + k * size, (u32)a.classes);
  }
  // A pair of vectors at a time: more would not leave registers for those on their way.
  GPU_FN void add(LogSum<Math>& sums, const RowVectors<type>& row, u32 v, const Raw (&raw)[ahead]) const {
    const bool whole = row.whole(v, (ahead - 1) * size, (u32)a.classes);
    GPU_UNROLL_FOR (int k = 0; k < ahead; k += 2) {
      Math x[2][P::width], both[2 * P::width];
      P::unpack_raw(x[0], raw[k]);
      P::unpack_raw(x[1], raw[k + 1]);
      GPU_UNROLL_FOR (int i = 0; i < 2 * P::width; ++i) both[i] = x[i / P::width][i % P::width];
      if (!whole)
        GPU_UNROLL_FOR (int i = 0; i < 2 * P::width; ++i)
          if (!row.has(v + (k + i / P::width) * size, i % P::width, (u32)a.classes)) both[i] = minus_infinity<Math>();
      sums.add(both);
    }
  }

  GPU_FN void put_nothing(i64 unit) const {
    const LogP<Math> zero{};
    reinterpret_cast<LogP<Math>*>(a.alpha)[unit] = reinterpret_cast<LogP<Math>*>(a.beta)[unit] = zero;
    if (a.normalizers && !a.batch_offset) reinterpret_cast<LogP<Math>*>(a.normalizers)[unit] = zero;
  }
  GPU_FN void put(const TransducerNode& node, u32 labels, i64 row, const LogP<Math>& normalizer) const {
    const u8* const x = a.x + row * a.classes * P::size;
    if (a.normalizers) reinterpret_cast<LogP<Math>*>(a.normalizers)[row] = normalizer;
    const auto log_p = [&](i64 index) { return (load_one<Math>(x, type, index) - normalizer.whole) - normalizer.rest; };
    Math next = minus_infinity<Math>();
    if (node.u + 1 < labels) {
      const i64 label = label_of(a, node.b, node.u);
      next = (u64)label < (u64)a.classes ? log_p(label) : not_a_number<Math>();
    }
    Math* const to = reinterpret_cast<Math*>(a.emissions) +
                     ((node.b * (a.frames + a.labels - 1) + node.t + node.u) * a.labels + node.u) * 2;
    to[0] = log_p(a.blank);
    to[1] = next;
  }
};
template <i32 type> GPU_FN void transducer_loss_emissions(const TransducerLossForward& a) {
  TransducerEmissions<type>(a).run();
}
#endif
}  // namespace gpu
