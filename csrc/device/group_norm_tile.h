// Group norm, channels last, of images whose strip fits in a block's shared memory: a strip is whole groups, its memory
// is read once, and threads find in shared memory what they put there themselves.
#pragma once
#include "group_norm_last.h"

namespace gpu {
#if !defined(GPU_HOST)
constexpr u32 group_norm_vector_bytes = 16;

// The thread's vectors of one tensor: row k of the thread in slot k.
struct TileSlots {
  u8* mine;
  GPU_FN TileSlots(u8* tile) : mine(tile + thread_x() * group_norm_vector_bytes) {}
  GPU_FN u8* at(u32 k) const { return mine + (i64)k * block_size_x() * group_norm_vector_bytes; }
  GPU_FN void put(u32 k, const u8* from) const {
#if defined(GPU_HIP)
    *reinterpret_cast<Words*>(at(k)) = *reinterpret_cast<const Words*>(from);
#else
    copy_async<group_norm_vector_bytes>(at(k), from);
#endif
  }
  template <i32 type, int width> GPU_FN void get(float (&x)[width], u32 k) const {
    unpack(x, *reinterpret_cast<const Words*>(at(k)), type);
  }
};
// put(k) for the rows of the thread, then take(k): of a quarter of them as soon as it has arrived. `most`: rows of any
// thread.
template <class Put, class Take> GPU_FN void stage_rows(u32 rows, u32 most, const Put& put, const Take& take) {
#if defined(GPU_HIP)
  for (u32 k = 0; k < rows; ++k) put(k);
  for (u32 k = 0; k < rows; ++k) take(k);
#else
  const u32 quarter = (most + 3) / 4;
  for (u32 q = 0; q < 4; ++q) {
    for (u32 k = q * quarter; k < (q + 1) * quarter; ++k)
      if (k < rows) put(k);
    copy_async_commit();
  }
  const auto take_quarter = [&](u32 q) {
    for (u32 k = q * quarter; k < (q + 1) * quarter; ++k)
      if (k < rows) take(k);
  };
  copy_async_wait<3>();
  take_quarter(0);
  copy_async_wait<2>();
  take_quarter(1);
  copy_async_wait<1>();
  take_quarter(2);
  copy_async_wait<0>();
  take_quarter(3);
#endif
}

template <i32 type, int width> GPU_FN void group_norm_forward_tile(const GroupNorm& a) {
  constexpr bool exact = type == type_f32;
  GPU_DYNAMIC_SHARED(float, memory);
  const GroupNormShared<float, width> shared(memory);
  const TileSlots tile(shared.rest);
  const u32 tile_rows = (u32)quotient(a.spatial - 1, a.lanes) + 1;
  const i64 items = a.batch * a.strips, step = (i64)a.lanes * a.channels * bytes_of(type);
  const bool silu = a.silu != 0;
  for (i64 item = block_x(); item < items; item += grid_x()) {
    const StripItem<width> at(a, item, 1, a.spatial);
    const u32 rows = at.rows(a);
    const i64 element = at.element(a);
    const u8* const from = a.input + element * bytes_of(type);
    const float zeros[width] = {};
    ShiftedSums<float, width> sums(zeros);
    stage_rows(
        rows, tile_rows, [&](u32 k) { tile.put(k, from + k * step); },
        [&](u32 k) {
          float x[width];
          tile.get<type>(x, k);
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
            if (k == 0) sums.first[i] = x[i];
            const float d = x[i] - sums.first[i];
            sums.sum[i] += d;
            sums.square[i] = fma(d, d, sums.square[i]);
          }
        });
    Moments<float> mine[width] = {};
    if (rows) {
      float pivot[width] = {};
      group_pivots<type>(pivot, a, at);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) mine[i] = sums.moments(i, (float)rows, pivot[i]);
    }
    const StripMerge<Moments<float>, width> merged(a, shared, mine);
    for_each_group(at, merged, Unchanged(), [&](u32 group, const Moments<float>& sum) {
      const GroupStatistics<float> found(a, group_pivot<type, float>(a, at.image, group, at.group_channels), sum.m2,
                                         sum.mean, at.group_channels);
      found.store(a, at.image, group);
      shared.group_first[group - at.first_group] = found.mean;
      shared.group_second[group - at.first_group] = found.rstd;
    });
    sync_threads();
    const ForwardConstants<float, width> constants(a, at, shared.group_first, shared.group_second);
    u8* to = a.output + element * bytes_of(type);
    for (u32 k = 0; k < rows; ++k, to += step) {
      float x[width], y[width];
      tile.get<type>(x, k);
      constants.normalize(y, x);
      activate<float, exact>(y, silu);
      *reinterpret_cast<Words*>(to) = pack(y, type);
    }
  }
}

template <i32 type, int width> GPU_FN void group_norm_backward_tile(const GroupNorm& a) {
  constexpr bool exact = type == type_f32;
  GPU_DYNAMIC_SHARED(float, memory);
  const GroupNormShared<float, width> shared(memory);
  const u32 tile_rows = (u32)quotient(a.spatial - 1, a.lanes) + 1;
  const TileSlots tile(shared.rest), grads(shared.rest + (i64)tile_rows * block_size_x() * group_norm_vector_bytes);
  const i64 items = a.batch * a.strips, step = (i64)a.lanes * a.channels * bytes_of(type);
  const bool silu = a.silu != 0;
  for (i64 item = block_x(); item < items; item += grid_x()) {
    const StripItem<width> at(a, item, 1, a.spatial);
    const u32 rows = at.rows(a);
    const i64 first = at.element(a) * bytes_of(type);
    const BackwardConstants<float, width> constants(a, at);
    GradientSums<float, width, exact> sums;
    stage_rows(
        rows, tile_rows,
        [&](u32 k) {
          tile.put(k, a.input + first + k * step);
          grads.put(k, a.grad_output + first + k * step);
        },
        [&](u32 k) {
          float x[width], dy[width];
          tile.get<type>(x, k);
          grads.get<type>(dy, k);
          sums.add(constants, x, dy, silu);
        });
    using Sums = GroupNormSums<float, exact>;
    Sums mine[width];
    sums.leave(mine, a, at);
    const StripMerge<Sums, width> merged(a, shared, mine);
    if (a.channel_partials) store_channel_sums(a, at, merged);
    const float by_count = 1.0f / ((float)a.spatial * (float)at.group_channels);
    for_each_group(at, merged, TimesWeight{a}, [&](u32 group, const Sums& sum) {
      shared.group_first[group - at.first_group] = sum.first() * by_count;
      shared.group_second[group - at.first_group] = sum.second() * by_count;
    });
    sync_threads();
    const InputGradient<float, width, exact> gradient(a, at, constants, shared.group_first, shared.group_second);
    for (u32 k = 0; k < rows; ++k) {
      float x[width], dy[width];
      tile.get<type>(x, k);
      grads.get<type>(dy, k);
      gradient.apply(x, dy, silu);
      *reinterpret_cast<Words*>(a.output + first + k * step) = pack(dy, type);
    }
  }
}
#endif
}  // namespace gpu
