// Products with rows that an index picks, and sums of products by that index: what index_mul_2d's forward and gradients
// are made of.
//
//   gather:   out[i] = a[index[i]] * b[i]
//   scatter:  out[e] = sum of a[i] * b[i] over the rows i whose index is e
//
// A row whose index is outside [0, entries) reads nothing and is nan. Sums go through the rows in their own order, so
// they need no atomics and are the same from run to run; rows whose index is outside are in none.
#pragma once
#include "index_mul_2d_arguments.h"
#include "packets.h"

namespace gpu {
#if !defined(GPU_HOST)
// Calls work(row, packet of that row, whether it is a single element) for each packet of `rows` rows.
template <int width, class Work> GPU_FN void each_packet(const IndexMul2d& a, i64 rows, Work&& work) {
  const i64 packets = a.in_vectors ? a.features / width : a.features, all = rows * packets;
  const i64 step = (i64)grid_x() * block_size_x();
  for (i64 i = (i64)block_x() * block_size_x() + thread_x(); i < all; i += step) {
    // A division of 32 bits is a fraction of one of 64.
    const i64 row = all <= 0x7fffffff ? (i64)((u32)i / (u32)packets) : i / packets;
    work(row, i - row * packets);
  }
}

template <i32 type> GPU_FN void index_mul_2d_gather(const IndexMul2d& a) {
  using P = Packet<type>;
  using Math = typename P::Math;
  using Raw = typename P::Raw;
  each_packet<P::width>(a, a.rows, [&](i64 row, i64 packet) {
    const i64 index =
        a.wide_index ? reinterpret_cast<const i64*>(a.index)[row] : (i64) reinterpret_cast<const i32*>(a.index)[row];
    const bool inside = (u64)index < (u64)a.entries;
    const Math nan = (Math)bit_cast<float>(0x7fc00000u);
    const i64 from = (inside ? index : 0) * a.features, to = row * a.features;
    if (a.in_vectors) {
      Math x[P::width], y[P::width];
      P::unpack_raw(y, reinterpret_cast<const Raw*>(a.b + to * P::size)[packet]);
      if (inside) P::unpack_raw(x, reinterpret_cast<const Raw*>(a.a + from * P::size)[packet]);
      else
        GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) x[i] = nan;
      GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) x[i] *= y[i];
      reinterpret_cast<Raw*>(a.out + to * P::size)[packet] = P::pack_raw(x);
    } else {
      const Math x = inside ? load_one<Math>(a.a, type, from + packet) : nan;
      store_one(a.out, type, to + packet, x * load_one<Math>(a.b, type, to + packet));
    }
  });
}

template <i32 type> GPU_FN void index_mul_2d_scatter(const IndexMul2d& a) {
  using P = Packet<type>;
  using Math = typename P::Math;
  using Raw = typename P::Raw;
  const i64* const order = reinterpret_cast<const i64*>(a.order);
  const i64* const begins = reinterpret_cast<const i64*>(a.begins);
  each_packet<P::width>(a, a.entries, [&](i64 entry, i64 packet) {
    const i64 end = begins[entry + 1], to = entry * a.features;
    if (a.in_vectors) {
      Math sum[P::width] = {};
      for (i64 k = begins[entry]; k < end; ++k) {
        const i64 from = order[k] * a.features;
        Math x[P::width], y[P::width];
        P::unpack_raw(x, reinterpret_cast<const Raw*>(a.a + from * P::size)[packet]);
        P::unpack_raw(y, reinterpret_cast<const Raw*>(a.b + from * P::size)[packet]);
        GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) sum[i] = fma(x[i], y[i], sum[i]);
      }
      reinterpret_cast<Raw*>(a.out + to * P::size)[packet] = P::pack_raw(sum);
    } else {
      Math sum = Math(0);
      for (i64 k = begins[entry]; k < end; ++k) {
        const i64 at = order[k] * a.features + packet;
        sum = fma(load_one<Math>(a.a, type, at), load_one<Math>(a.b, type, at), sum);
      }
      store_one(a.out, type, to + packet, sum);
    }
  });
}
#endif
}  // namespace gpu
