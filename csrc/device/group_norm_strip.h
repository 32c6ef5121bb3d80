// Channels last: a block's strip of channels, a thread's place in it, and sums over its rows and groups.
#pragma once
#include "channel_apply.h"
#include "channel_reduce.h"
#include "group_norm.h"

namespace gpu {
#if !defined(GPU_HOST)
// A block's shared memory: what its threads hold (one count and 2 * width numbers each), and two numbers a group.
template <class Math, int width> struct GroupNormShared {
  Math *counts, *firsts, *seconds, *group_first, *group_second;
  u8* rest;

  GPU_FN explicit GroupNormShared(Math* memory) {
    const u32 threads = block_size_x();
    counts = memory;
    firsts = counts + threads;
    seconds = firsts + width * threads;
    group_first = seconds + width * threads;
    group_second = group_first + threads;
    rest = reinterpret_cast<u8*>(group_second + threads);
  }
};

// A part of the rows of a strip of an image. `parts`: of each strip, of at most `part_rows` rows. Channels are counted
// in 32 bits.
template <int width> struct StripItem {
  u32 strip, column, lane;
  i64 image, part, begin, end;         // rows
  u32 first_channel, past_channel;     // of the strip
  u32 first_group, last_group;         // that it touches
  u32 group_channels, strip_channels;  // strip_channels: of every strip but the last
  u32 channel;                         // the first of the thread's
  bool active;                         // the thread has channels, and rows if there are enough

  GPU_FN StripItem(const GroupNorm& a, i64 item, u32 parts, i64 part_rows) {
    const i64 rest = quotient(item, a.strips);
    strip = (u32)(item - rest * a.strips);
    image = quotient(rest, parts);
    part = rest - image * parts;
    begin = part * part_rows;
    end = begin + part_rows < a.spatial ? begin + part_rows : a.spatial;
    group_channels = (u32)a.channels / (u32)a.groups;
    strip_channels = a.columns * width;
    first_channel = strip * strip_channels;
    past_channel = first_channel + strip_channels < (u32)a.channels ? first_channel + strip_channels : (u32)a.channels;
    first_group = first_channel / group_channels;
    last_group = (past_channel - 1) / group_channels;
    column = thread_x() % a.columns;
    lane = thread_x() / a.columns;
    channel = first_channel + column * width;
    active = lane < a.lanes && channel < (u32)a.channels;
  }
  // How many rows are the thread's: `lane`, lane + lanes, ... of the part.
  GPU_FN u32 rows(const GroupNorm& a) const {
    const i64 left = end - begin - lane;
    return active && left > 0 ? (u32)quotient(left - 1, a.lanes) + 1 : 0;
  }
  GPU_FN i64 element(const GroupNorm& a) const { return ((image * a.spatial + begin + lane) * a.channels) + channel; }
  // each(i, group) for the thread's channels. Those past the last channel are in its group.
  template <class Each> GPU_FN void for_each_channel(const Each& each) const {
    u32 group = channel / group_channels, inside = channel - group * group_channels;
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      each(i, group < last_group ? group : last_group);
      if (++inside == group_channels) inside = 0, ++group;
    }
  }
};

template <class Math, int width>
GPU_FN void load_affine(Math (&x)[width], const u8* from, i32 type, const StripItem<width>& at, Math otherwise) {
  GPU_UNROLL_FOR (int i = 0; i < width; ++i)
    x[i] = at.active ? affine(from, type, at.channel + i, otherwise) : otherwise;
}

// The lanes of a block, merged for each channel. Afterwards every thread finds what is left with merge_channel: of each
// channel `helpers` numbers.
template <class A, int width> struct StripMerge {
  using Math = typename A::Math;
  const GroupNormShared<Math, width>& shared;
  u32 columns, helpers;

  GPU_FN StripMerge(const GroupNorm& a, const GroupNormShared<Math, width>& shared_, const A (&mine)[width])
      : shared(shared_), columns(a.columns) {
    const u32 threads = block_size_x(), t = thread_x(), channels = columns * width;
    helpers = threads / channels;
    if (helpers > a.lanes) helpers = a.lanes;
    sync_threads();  // readers of an earlier merge may still be at work
    put(t, mine[0].count, mine);
    const u32 helper = t / channels, q = t % channels, column = q % columns, element = q / columns;
    A sum{};
    sync_threads();
    if (helper < helpers)
      for (u32 lane = helper; lane < a.lanes; lane += helpers) sum.merge(get(lane, column, element));
    sync_threads();
    if (helper < helpers) {
      const u32 to = helper * columns + column;
      if (element == 0) shared.counts[to] = sum.count;
      shared.firsts[element * threads + to] = sum.first();
      shared.seconds[element * threads + to] = sum.second();
    }
    sync_threads();
  }
  // Of channel q of the strip.
  GPU_FN A get_channel(u32 helper, u32 q) const { return get(helper, q / width, q % width); }
  GPU_FN A merge_channel(u32 q) const {
    A sum{};
    for (u32 helper = 0; helper < helpers; ++helper) sum.merge(get_channel(helper, q));
    return sum;
  }

 private:
  GPU_FN void put(u32 to, Math count, const A (&mine)[width]) const {
    const u32 threads = block_size_x();
    shared.counts[to] = count;
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      shared.firsts[i * threads + to] = mine[i].first();
      shared.seconds[i * threads + to] = mine[i].second();
    }
  }
  GPU_FN A get(u32 lane, u32 column, u32 element) const {
    const u32 from = lane * columns + column, threads = block_size_x();
    return A::of(shared.counts[from], shared.firsts[element * threads + from],
                 shared.seconds[element * threads + from]);
  }
};

// each(group, sum) in one thread, for every group that the strip touches: of its channels in the strip, as
// change(channel, sum of the channel's) gives them. Warps take groups, their lanes channels.
template <class A, int width, class Change, class Each>
GPU_FN void for_each_group(const StripItem<width>& at, const StripMerge<A, width>& merged, const Change& change,
                           const Each& each) {
  const u32 warp = thread_x() / warp_size, warps = block_size_x() / warp_size;
  for (u32 group = at.first_group + warp; group <= at.last_group; group += warps) {
    const u32 begin = group * at.group_channels, end = begin + at.group_channels;
    const u32 first = (begin < at.first_channel ? at.first_channel : begin) - at.first_channel;
    const u32 count = (end > at.past_channel ? at.past_channel : end) - at.first_channel - first;
    A sum{};
    for (u32 j = lane_id(); j < count * merged.helpers; j += warp_size) {
      const u32 q = first + j % count;
      sum.merge(change(at.first_channel + q, merged.get_channel(j / count, q)));
    }
    sum = warp_merge(sum);
    if (lane_id() == 0) each(group, sum);
  }
}
struct Unchanged {
  template <class A> GPU_FN A operator()(u32, const A& sum) const { return sum; }
};
// A channel's sums of g and g * x^, as they count in its group.
struct TimesWeight {
  const GroupNorm& a;
  template <class A> GPU_FN A operator()(u32 channel, const A& sum) const {
    const auto weight = affine(a.weight, a.weight_type, channel, typename A::Math(1));
    return A::of(0, sum.first() * weight, sum.second() * weight);
  }
};

// What a group's differences are taken from: its first element. Sums and merges of a large mean would round.
template <i32 type, class Math> GPU_FN Math group_pivot(const GroupNorm& a, i64 image, u32 group, u32 group_channels) {
  const i64 channel = (i64)group * group_channels;
  Math x[1];
  load_values(x, a.input, known_type<type>(a.input_type),
              a.channels_last ? image * a.spatial * a.channels + channel : (image * a.channels + channel) * a.spatial);
  return x[0];
}
template <i32 type, class Math, int width> GPU_FN void group_pivots(Math (&pivot)[width], const GroupNorm& a,
                                                                    const StripItem<width>& at) {
  u32 last = ~0u;
  at.for_each_channel([&](int i, u32 group) {
    pivot[i] = group == last ? pivot[i ? i - 1 : 0] : group_pivot<type, Math>(a, at.image, group, at.group_channels);
    last = group;
  });
}

// Mean and 1 / standard deviation of what a group's elements come to.
template <class Math> struct GroupStatistics {
  Math mean, rstd;
  GPU_FN GroupStatistics(const GroupNorm& a, Math pivot, Math m2, Math mean_apart, u32 group_channels)
      : mean(pivot + mean_apart), rstd(inverse_deviation(m2, (Math)a.spatial * (Math)group_channels, (Math)a.eps)) {}
  GPU_FN void store(const GroupNorm& a, i64 image, i64 group) const {
    reinterpret_cast<Math*>(a.mean)[image * a.groups + group] = mean;
    reinterpret_cast<Math*>(a.rstd)[image * a.groups + group] = rstd;
  }
};
#endif
}  // namespace gpu
