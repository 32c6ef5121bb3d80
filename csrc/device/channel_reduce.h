// Two numbers for each channel of a tensor: its mean and variance (welford_mean_var), or the sums that batch norm's
// backward needs (reduce_bn). The order of every sum is fixed, so results are the same from run to run.
//
// Channels first, a block takes a part of one channel; channels last, some adjacent channels of a run of rows.
#pragma once
#include "batchnorm_arguments.h"
#include "reduce.h"
#include "vectors.h"
#include "welford.h"

namespace gpu {
// A channel's first element. Moments are those of differences from it: sums and merges of a large mean would round.
template <class Math> GPU_FN Math load_pivot(const ChannelReduce& a, i64 channel) {
  Math x[1];
  load_values(x, a.input, a.input_type, channel * a.spatial);
  return x[0];
}

#if !defined(GPU_HOST)
template <class T> struct MathOf { using type = float; };
template <> struct MathOf<double> { using type = double; };
template <class T> constexpr int vector_width = 16 / (int)sizeof(T);

// ---- ends of a reduction ------------------------------------------------------------------------------
template <class A> GPU_FN A warp_merge(A a) {
  using Math = typename A::Math;
  GPU_UNROLL for (int mask = warp_size / 2; mask; mask >>= 1) {
    const Math count = shuffle_xor_value(a.count, mask), first = shuffle_xor_value(a.first(), mask),
               second = shuffle_xor_value(a.second(), mask);
    a.merge(A::of(count, first, second));
  }
  return a;
}
// Of all threads of a block; thread 0's result is the one that counts.
template <class A> GPU_FN A block_merge(A a) {
  using Math = typename A::Math;
  constexpr u32 most = channel_threads / warp_size;
  GPU_SHARED(Math, partial, 3 * most);
  a = warp_merge(a);
  sync_threads();  // readers of an earlier call may still be at work
  const u32 warp = thread_x() / warp_size, warps = block_size_x() / warp_size, lane = lane_id();
  if (lane == 0) {
    partial[warp] = a.count;
    partial[most + warp] = a.first();
    partial[2 * most + warp] = a.second();
  }
  sync_threads();
  const bool there = lane < warps;
  a = A::of(there ? partial[lane] : Math(0), there ? partial[most + lane] : Math(0), there ? partial[2 * most + lane] : Math(0));
  return warp_merge(a);
}

template <class A> GPU_FN void store_partial(const ChannelReduce& a, u32 part, i64 channel, const A& sum) {
  auto* to = reinterpret_cast<typename A::Math*>(a.partials) + (i64)part * 3 * a.channels + channel;
  to[0] = sum.count;
  to[a.channels] = sum.first();
  to[2 * a.channels] = sum.second();
}
// The sum of parts first, first + step, ..., several of them on their way at once.
template <class A> GPU_FN A merge_partials(const ChannelReduce& a, u32 first, u32 step, i64 channel) {
  using Math = typename A::Math;
  constexpr int ahead = sizeof(Math) == 8 ? 1 : 4;
  const Math* from = reinterpret_cast<const Math*>(a.partials) + channel;
  A sum{};
  for (u32 part = first; part < a.parts; part += ahead * step) {
    Math x[ahead][3];
    GPU_UNROLL for (int k = 0; k < ahead; ++k) {
      const u32 p = part + k * step;
      GPU_UNROLL for (int n = 0; n < 3; ++n) x[k][n] = p < a.parts ? load_coherent(from + ((i64)p * 3 + n) * a.channels) : Math(0);
    }
    GPU_UNROLL for (int k = 0; k < ahead; ++k) sum.merge(A::of(x[k][0], x[k][1], x[k][2]));
  }
  return sum;
}

template <class Math> GPU_FN void store_channel(const ChannelReduce& a, i64 channel, const Moments<Math>& sum) {
  Math* to = reinterpret_cast<Math*>(a.sums);
  to[channel] = load_pivot<Math>(a, channel) + sum.mean;
  to[a.channels + channel] = sum.m2 / sum.count;
  if (channel == 0) to[2 * a.channels] = (Math)(a.batch * a.spatial);
}
template <class Math> GPU_FN void store_channel(const ChannelReduce& a, i64 channel, const TwoSums<Math>& sum) {
  Math* to = reinterpret_cast<Math*>(a.sums);
  to[channel] = sum.sums[0];
  to[a.channels + channel] = sum.sums[1];
  const Math of_bias[1] = {sum.sums[0]}, of_weight[1] = {sum.sums[1] * reinterpret_cast<const Math*>(a.inv_std)[channel]};
  if (a.grad_weight) store_values(a.grad_weight, a.weight_type, channel, of_weight);
  if (a.grad_bias) store_values(a.grad_bias, a.weight_type, channel, of_bias);
}

// ---- what a thread adds up ------------------------------------------------------------------------------
// One channel, or `width` adjacent ones: differences from the thread's first element, and their squares. That element
// is one of those it counts, so the squares exceed the squared sum by at least an n-th: of n elements (some hundreds)
// the variance keeps all but n roundings even if the first is far from the others, and nothing is lost if it is not.
template <class Math, int width> struct ShiftedSums {
  Math first[width], sum[width], square[width];

  template <class T> GPU_FN explicit ShiftedSums(const T (&x)[width]) {
    GPU_UNROLL for (int i = 0; i < width; ++i) {
      first[i] = load_as<Math>(x[i]);
      sum[i] = square[i] = Math(0);
    }
  }
  GPU_FN Moments<Math> moments(int i, Math count, Math pivot) const {
    const Math mean = sum[i] / count;
    return {count, first[i] - pivot + mean, maximum(Math(0), fma(-mean, sum[i], square[i]))};
  }
};

// ---- channels first -----------------------------------------------------------------------------------
// A thread's way through the vectors of one channel. A segment need not begin at a multiple of 16 bytes: vectors do,
// and those at its ends hold elements of its neighbours too, which are left out.
template <class T> struct SegmentWalk {
  static constexpr int width = vector_width<T>;
  static constexpr u32 all = (1u << width) - 1;
  i64 start;  // of the segment, in elements
  u32 vector; // of the segment

  GPU_FN SegmentWalk(const ChannelReduce& a, u32 channel, u32 at) {
    const u32 segment = at / a.segment_vectors;
    vector = at - segment * a.segment_vectors;
    start = ((i64)segment * a.channels + channel) * a.spatial;
  }
  GPU_FN void next(const ChannelReduce& a) {
    const i64 pitch = a.channels * a.spatial;
    vector += a.step_vectors;
    start += a.step_segments * pitch;
    if (vector >= a.segment_vectors) {
      vector -= a.segment_vectors;
      start += pitch;
    }
  }
  // Where the vector begins, in elements past the segment's first one; may lie before it.
  GPU_FN i64 place(const T* tensor) const {
    const u32 lead = (u32)(reinterpret_cast<u64>(tensor + start) / sizeof(T)) & (width - 1);
    return (i64)vector * width - lead;
  }
  // Loads what of the vector is the segment's; bit i says that element i is.
  GPU_FN u32 load(Vector<T, width>& x, const T* tensor, i64 place, i64 spatial, bool whole) const {
    const T* p = tensor + start + place;
    if (place >= 0 && place + width <= spatial) {
      if (whole) x = *reinterpret_cast<const Vector<T, width>*>(p);
      else GPU_UNROLL for (int i = 0; i < width; ++i) x.v[i] = p[i];
      return all;
    }
    u32 mask = 0;
    GPU_UNROLL for (int i = 0; i < width; ++i) {
      if (place + i < 0 || place + i >= spatial) continue;
      x.v[i] = p[i];
      mask |= 1u << i;
    }
    return mask;
  }
};
GPU_FN u32 bits_of(u32 mask) {
  u32 count = 0;
  for (; mask; mask &= mask - 1) ++count;
  return count;
}

template <class A> GPU_FN void finish_channel(const ChannelReduce& a, A mine, u32 channel, u32 part) {
  GPU_SHARED(u32, is_last, 1);
  mine = block_merge(mine);
  if (a.parts > 1) {
    if (thread_x() == 0) store_partial(a, part, channel, mine);
    if (!is_last_of(a.counters + channel, a.parts, is_last)) return;
    mine = block_merge(merge_partials<A>(a, thread_x(), block_size_x(), channel));
  }
  if (thread_x() == 0) store_channel(a, channel, mine);
}

// Blocks: parts * channels, those of one part side by side.
template <class T> GPU_FN void welford_channels_first(const ChannelReduce& a) {
  using Math = typename MathOf<T>::type;
  using Walk = SegmentWalk<T>;
  const T* const input = reinterpret_cast<const T*>(a.input);
  const u32 channel = block_x() % (u32)a.channels, part = block_x() / (u32)a.channels;
  const u32 vectors = (u32)a.batch * a.segment_vectors, begin = part * a.part_vectors;
  const u32 end = vectors - begin < a.part_vectors ? vectors : begin + a.part_vectors;
  u32 at = begin + thread_x();
  Moments<Math> mine{};
  if (at < end) {
    constexpr int together = 2;
    Walk walk(a, channel, at);
    i64 inside = walk.place(input);
    if (inside < 0) inside = 0;
    if (inside >= a.spatial) inside = a.spatial - 1;
    const T first[1] = {input[walk.start + inside]};
    ShiftedSums<Math, 1> sums[together] = {ShiftedSums<Math, 1>(first), ShiftedSums<Math, 1>(first)};
    u32 count = 0;
    while (at < end) {
      Vector<T, Walk::width> x[together];
      u32 masks[together];
      GPU_UNROLL for (int k = 0; k < together; ++k) {
        masks[k] = at < end ? walk.load(x[k], input, walk.place(input), a.spatial, true) : 0;
        walk.next(a);
        at += block_size_x();
      }
      GPU_UNROLL for (int k = 0; k < together; ++k) {
        const auto add = [&](int i) {
          const Math d = load_as<Math>(x[k].v[i]) - sums[k].first[0];
          sums[k].sum[0] += d;
          sums[k].square[0] = fma(d, d, sums[k].square[0]);
        };
        if (masks[k] == Walk::all) {
          GPU_UNROLL for (int i = 0; i < Walk::width; ++i) add(i);
          count += Walk::width;
        } else {
          GPU_UNROLL for (int i = 0; i < Walk::width; ++i)
            if (masks[k] >> i & 1) add(i);
          count += bits_of(masks[k]);
        }
      }
    }
    sums[0].sum[0] += sums[1].sum[0];
    sums[0].square[0] += sums[1].square[0];
    if (count) mine = sums[0].moments(0, (Math)count, load_pivot<Math>(a, channel));
  }
  finish_channel(a, mine, channel, part);
}

template <class T> GPU_FN void gradients_channels_first(const ChannelReduce& a) {
  using Math = typename MathOf<T>::type;
  using Walk = SegmentWalk<T>;
  const T* const input = reinterpret_cast<const T*>(a.input);
  const T* const grad_output = reinterpret_cast<const T*>(a.grad_output);
  const u32 channel = block_x() % (u32)a.channels, part = block_x() / (u32)a.channels;
  const u32 vectors = (u32)a.batch * a.segment_vectors, begin = part * a.part_vectors;
  const u32 end = vectors - begin < a.part_vectors ? vectors : begin + a.part_vectors;
  const Math mean = reinterpret_cast<const Math*>(a.mean)[channel];
  u32 at = begin + thread_x();
  Math of_dy = Math(0), of_dy_xmu = Math(0);
  if (at < end) {
    Walk walk(a, channel, at);
    while (at < end) {
      constexpr int together = 2;
      Vector<T, Walk::width> x[together], dy[together];
      u32 masks[together];
      GPU_UNROLL for (int k = 0; k < together; ++k) {
        masks[k] = 0;
        if (at < end) {
          const i64 place = walk.place(input);
          masks[k] = walk.load(x[k], input, place, a.spatial, true);
          walk.load(dy[k], grad_output, place, a.spatial, a.same_alignment != 0);
        }
        walk.next(a);
        at += block_size_x();
      }
      GPU_UNROLL for (int k = 0; k < together; ++k) {
        Math sum = Math(0), sum_xmu = Math(0);
        if (masks[k] == Walk::all) {
          GPU_UNROLL for (int i = 0; i < Walk::width; ++i) {
            const Math g = load_as<Math>(dy[k].v[i]);
            sum += g;
            sum_xmu = fma(g, load_as<Math>(x[k].v[i]) - mean, sum_xmu);
          }
        } else {
          GPU_UNROLL for (int i = 0; i < Walk::width; ++i) {
            if (!(masks[k] >> i & 1)) continue;
            const Math g = load_as<Math>(dy[k].v[i]);
            sum += g;
            sum_xmu = fma(g, load_as<Math>(x[k].v[i]) - mean, sum_xmu);
          }
        }
        of_dy += sum;
        of_dy_xmu += sum_xmu;
      }
    }
  }
  finish_channel(a, TwoSums<Math>::of(Math(0), of_dy, of_dy_xmu), channel, part);
}

// ---- channels last --------------------------------------------------------------------------------------
// A thread's place: `width` adjacent channels, and every lanes-th row of its part.
template <int width> struct ColumnPlace {
  u32 column_block, part, column, lane, lanes;
  i64 channel;  // the first of the thread's
  bool active;
  i64 begin;
  u32 rows;

  GPU_FN explicit ColumnPlace(const ChannelReduce& a) {
    column_block = block_x() % a.column_blocks;
    part = block_x() / a.column_blocks;
    column = thread_x() & (a.columns - 1);
    lane = thread_x() / a.columns;
    lanes = block_size_x() / a.columns;
    channel = ((i64)column_block * a.columns + column) * width;
    active = channel < a.channels;
    begin = part * a.part_rows;
    const i64 left = a.batch - begin;
    rows = (u32)(left < a.part_rows ? left : a.part_rows);
  }
};

// Merges the lanes of a block for each of its channels; in the launch's last block, the parts too.
template <class A, int width> GPU_FN void finish_columns(const ChannelReduce& a, const ColumnPlace<width>& at, const A (&mine)[width]) {
  using Math = typename A::Math;
  GPU_SHARED(Math, firsts, channel_threads * width);
  GPU_SHARED(Math, seconds, channel_threads * width);
  GPU_SHARED(Math, counts, channel_threads);
  GPU_SHARED(u32, is_last, 1);
  const u32 threads = block_size_x(), t = thread_x();
  counts[t] = mine[0].count;
  GPU_UNROLL for (int i = 0; i < width; ++i) {
    firsts[i * threads + t] = mine[i].first();
    seconds[i * threads + t] = mine[i].second();
  }
  // A thread takes one channel, of every groups-th lane.
  const u32 channels = a.columns * width, q = t % channels, group = t / channels, groups = threads / channels;
  const u32 element = q / a.columns * threads, column = q & (a.columns - 1);
  const i64 channel = ((i64)at.column_block * a.columns + column) * width + q / a.columns;
  const bool active = channel < a.channels;
  const auto merge_lanes = [&](u32 first, u32 step, u32 end) {
    A sum{};
    for (u32 lane = first; lane < end; lane += step) {
      const u32 from = lane * a.columns + column;
      sum.merge(A::of(counts[from], firsts[element + from], seconds[element + from]));
    }
    return sum;
  };
  const auto leave = [&](const A& sum) {
    const u32 to = group * a.columns + column;
    sync_threads();
    if (q < a.columns) counts[to] = sum.count;
    firsts[element + to] = sum.first();
    seconds[element + to] = sum.second();
    sync_threads();
  };
  sync_threads();
  leave(merge_lanes(group, groups, at.lanes));
  A total = merge_lanes(0, 1, group == 0 ? groups : 0);
  if (a.parts > 1) {
    if (group == 0 && active) store_partial(a, at.part, channel, total);
    if (!is_last_of(a.counters + at.column_block, a.parts, is_last)) return;
    A sum{};
    if (active) sum = merge_partials<A>(a, group, groups, channel);
    leave(sum);
    total = merge_lanes(0, 1, group == 0 ? groups : 0);
  }
  if (group == 0 && active) store_channel(a, channel, total);
}

// Blocks: parts * column_blocks, those of one part side by side.
template <class T, int width> GPU_FN void welford_channels_last(const ChannelReduce& a) {
  using Math = typename MathOf<T>::type;
  const ColumnPlace<width> at(a);
  Moments<Math> mine[width] = {};
  if (at.active && at.lane < at.rows) {
    const T* p = reinterpret_cast<const T*>(a.input) + (at.begin + at.lane) * a.channels + at.channel;
    const i64 step = (i64)at.lanes * a.channels;
    const Vector<T, width> first = *reinterpret_cast<const Vector<T, width>*>(p);
    ShiftedSums<Math, width> sums(first.v);
    constexpr u32 together = sizeof(T) == 8 ? 2 : 4;
    const auto add = [&](u32 rows) {
      Vector<T, width> x[together];
      GPU_UNROLL for (u32 k = 0; k < together; ++k)
        if (k < rows) x[k] = *reinterpret_cast<const Vector<T, width>*>(p + k * step);
      GPU_UNROLL for (u32 k = 0; k < together; ++k) {
        if (k >= rows) continue;
        GPU_UNROLL for (int i = 0; i < width; ++i) {
          const Math d = load_as<Math>(x[k].v[i]) - sums.first[i];
          sums.sum[i] += d;
          sums.square[i] = fma(d, d, sums.square[i]);
        }
      }
    };
    const u32 count = (at.rows - at.lane - 1) / at.lanes + 1;
    u32 left = count;
    for (; left >= together; left -= together, p += together * step) add(together);
    if (left) add(left);
    GPU_UNROLL for (int i = 0; i < width; ++i) mine[i] = sums.moments(i, (Math)count, load_pivot<Math>(a, at.channel + i));
  }
  finish_columns(a, at, mine);
}

// Bits of `width` elements of a mask, the first one lowest. They lie in one byte: index is a multiple of width.
template <int width> GPU_FN u32 load_bits(const u8* bitmask, i64 index) {
  const u32 byte = bitmask[index / 8];
  return width == 8 ? byte : byte >> ((u32)index & 7);
}

// masked: elements of grad_output whose bit is not set are 0.
template <class T, int width, bool masked = false> GPU_FN void gradients_channels_last(const ChannelReduce& a) {
  using Math = typename MathOf<T>::type;
  const ColumnPlace<width> at(a);
  TwoSums<Math> mine[width] = {};
  if (at.active && at.lane < at.rows) {
    const i64 from = (at.begin + at.lane) * a.channels + at.channel, step = (i64)at.lanes * a.channels;
    const T* p = reinterpret_cast<const T*>(a.input) + from;
    const T* g = reinterpret_cast<const T*>(a.grad_output) + from;
    Math mean[width];
    GPU_UNROLL for (int i = 0; i < width; ++i) mean[i] = reinterpret_cast<const Math*>(a.mean)[at.channel + i];
    i64 index = from;  // of the mask's bits; unused without
    constexpr u32 together = 2;
    const auto add = [&](u32 rows) {
      Vector<T, width> x[together], dy[together];
      u32 bits[together];
      GPU_UNROLL for (u32 k = 0; k < together; ++k) {
        if (k >= rows) continue;
        x[k] = *reinterpret_cast<const Vector<T, width>*>(p + k * step);
        dy[k] = *reinterpret_cast<const Vector<T, width>*>(g + k * step);
        if constexpr (masked) bits[k] = load_bits<width>(a.bitmask, index + k * step);
      }
      GPU_UNROLL for (u32 k = 0; k < together; ++k) {
        if (k >= rows) continue;
        GPU_UNROLL for (int i = 0; i < width; ++i) {
          Math d = load_as<Math>(dy[k].v[i]);
          if constexpr (masked) d = bits[k] >> i & 1 ? d : Math(0);
          mine[i].sums[0] += d;
          mine[i].sums[1] = fma(d, load_as<Math>(x[k].v[i]) - mean[i], mine[i].sums[1]);
        }
      }
      index += together * step;
      p += together * step;
      g += together * step;
    };
    u32 left = (at.rows - at.lane - 1) / at.lanes + 1;
    for (; left >= together; left -= together) add(together);
    if (left) add(left);
  }
  finish_columns(a, at, mine);
}
#endif
}  // namespace gpu

// For each element type a kernel for channels first, one for channels last, and one for channels last whose vectors
// do not fit.
#define CHANNEL_REDUCE_KERNEL(name, threads, blocks, ...)                                              \
  extern "C" GPU_KERNEL(threads, blocks) void name(gpu::ChannelReduce arguments) { __VA_ARGS__(arguments); } \
  GPU_REGISTER(name)
#define CHANNEL_REDUCE_KERNELS(op, function, name, T)                                                  \
  CHANNEL_REDUCE_KERNEL(op##_first_##name, gpu::channel_first_threads, 3, gpu::function##_channels_first<T>)                          \
  CHANNEL_REDUCE_KERNEL(op##_last_##name, gpu::channel_threads, 2, gpu::function##_channels_last<T, gpu::vector_width<T>>)      \
  CHANNEL_REDUCE_KERNEL(op##_last1_##name, gpu::channel_threads, 2, gpu::function##_channels_last<T, 1>)
// The same for channels last with a mask.
#define MASKED_CHANNEL_REDUCE_KERNELS(op, function, name, T)                                           \
  CHANNEL_REDUCE_KERNEL(op##_masked_last_##name, gpu::channel_threads, 2, gpu::function##_channels_last<T, gpu::vector_width<T>, true>) \
  CHANNEL_REDUCE_KERNEL(op##_masked_last1_##name, gpu::channel_threads, 2, gpu::function##_channels_last<T, 1, true>)
#define CHANNEL_TYPES(KERNELS, ...)                                                                    \
  KERNELS(__VA_ARGS__, f32, float)                                                                     \
  KERNELS(__VA_ARGS__, f16, gpu::half)                                                                 \
  KERNELS(__VA_ARGS__, bf16, gpu::bfloat16)                                                            \
  KERNELS(__VA_ARGS__, f64, double)
