// Two numbers for each channel of a tensor: its mean and variance (welford_mean_var), or the sums that batch norm's
// backward needs (reduce_bn). The order of every sum is fixed, so results are the same from run to run.
//
// Channels first, a block takes a part of one channel; channels last, some adjacent channels of a run of rows. All
// blocks run at once, and each thread has several vectors on their way while it adds up others: memory sets the pace.
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
// Sums of products of elements.
template <class T> struct SumsOfElements { using type = TwoSums<float>; };
template <> struct SumsOfElements<float> { using type = CarefulSums<float>; };
template <> struct SumsOfElements<double> { using type = CarefulSums<double>; };
template <class T> using SumsOf = typename SumsOfElements<T>::type;

// Blocks at once, of a multiprocessor. Compilers for what came before Ampere keep less in as many registers.
#if defined(GPU_CUDA) && __CUDA_ARCH__ < 800
template <class T> constexpr int channel_blocks = 1;
#else
template <class T> constexpr int channel_blocks = sizeof(T) == 8 ? 1 : 2;
#endif

// Some elements as memory has them, in whole registers: compilers give each element of two bytes one of its own.
template <class T, int width, bool pairs = sizeof(T) == 2 && width % 2 == 0> struct PackedOf {
  using type = Vector<T, width>;
};
template <class T, int width> struct PackedOf<T, width, true> { using type = Vector<u32, width / 2>; };
template <class T, int width> using Packed = typename PackedOf<T, width>::type;

template <int width, class T> GPU_FN Packed<T, width> load_packed(const T* p) {
  return *reinterpret_cast<const Packed<T, width>*>(p);
}
template <class T, int width, class Math> GPU_FN void unpack_values(Math (&x)[width], const Packed<T, width>& from) {
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
    if constexpr (sizeof(T) == 2 && width % 2 == 0)
      x[i] = to_float(T{(u16)(i % 2 ? from.v[i / 2] >> 16 : from.v[i / 2] & 0xffffu)});
    else x[i] = load_as<Math>(from.v[i]);
  }
}
template <> GPU_FN void unpack_values<bfloat16, 8, float>(float (&x)[8], const Vector<u32, 4>& from) {
  GPU_UNROLL_FOR (int i = 0; i < 8; ++i)
    x[i] = bit_cast<float>(i % 2 ? from.v[i / 2] & 0xffff0000u : from.v[i / 2] << 16);
}

template <class T, class Math, int width> GPU_FN Packed<T, width> pack_values(const Math (&x)[width]) {
  Packed<T, width> to;
  if constexpr (sizeof(T) == 2 && width % 2 == 0) {
    GPU_UNROLL_FOR (int i = 0; i < width / 2; ++i) to.v[i] = pack_two<T>(x[2 * i], x[2 * i + 1]);
  } else {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) store_as(to.v[i], x[i]);
  }
  return to;
}

// Calls load(k) and add(k) in turn for `count` vectors, the k-th of `together` that are on their way; start() when the
// first ones are.
template <int together, class Load, class Start, class Add>
GPU_FN void stream_vectors(u32 count, const Load& load, const Start& start, const Add& add) {
  GPU_UNROLL_FOR (u32 k = 0; k < together; ++k)
    if (k < count) load(k);
  start();
  u32 left = count < together ? 0 : count - together;
  for (; left >= together; left -= together) {
    GPU_UNROLL_FOR (u32 k = 0; k < together; ++k) {
      add(k);
      load(k);
    }
  }
  // At most twice: the last ones on their way, and those left.
  for (u32 ready = count; ready;) {
    GPU_UNROLL_FOR (u32 k = 0; k < together; ++k) {
      if (k < ready) add(k);
      if (k < left) load(k);
    }
    ready = left;
    left = 0;
  }
}

// ---- ends of a reduction ------------------------------------------------------------------------------
// `groups` adjacent lanes, a power of two.
template <class Math> GPU_FN Math group_sum(Math x, u32 groups) {
  for (u32 mask = groups / 2; mask; mask /= 2) x += shuffle_xor_value(x, (int)mask);
  return x;
}
// Merges all that the lanes of a group take, in one pass. Means count as differences from `origin`, one of them: what
// they are differences from may be far away, where they round. As in ShiftedSums below, n roundings of n of them are
// lost at most. (A chain of merges of two would divide once for each.)
template <class A> struct Merging {
  A sum{};
  GPU_FN explicit Merging(typename A::Math) {}
  GPU_FN void take(const A& x) { sum.merge(x); }
  GPU_FN A result(u32 groups) const {
    using Math = typename A::Math;
    return A::of(Math(0), group_sum(sum.first(), groups), group_sum(sum.second(), groups));
  }
};
template <class Math> struct Merging<Moments<Math>> {
  Math origin, count = Math(0), sum = Math(0), square = Math(0);
  GPU_FN explicit Merging(Math origin_) : origin(origin_) {}
  GPU_FN void take(const Moments<Math>& x) {
    const Math d = x.mean - origin, of_all = x.count * d;
    count += x.count;
    sum += of_all;
    square += fma(of_all, d, x.m2);
  }
  GPU_FN Moments<Math> result(u32 groups) const {
    const Math n = group_sum(count, groups), total = group_sum(sum, groups), mean = divide(total, maximum(n, Math(1)));
    return {n, origin + mean, maximum(Math(0), fma(-mean, total, group_sum(square, groups)))};
  }
};
template <class A> GPU_FN A warp_merge(const A& a) {
  Merging<A> merged(shuffle_xor_value(a.first(), (int)lane_id()));  // lane 0's
  merged.take(a);
  return merged.result(warp_size);
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
  if (warp) return a;
  const bool there = lane < warps;
  return warp_merge(A::of(there ? partial[lane] : Math(0), there ? partial[most + lane] : Math(0),
                          there ? partial[2 * most + lane] : Math(0)));
}

template <class A> GPU_FN void store_partial(const ChannelReduce& a, u32 part, i64 channel, const A& sum) {
  auto* to = reinterpret_cast<typename A::Math*>(a.partials) + (i64)part * 3 * a.channels + channel;
  to[0] = sum.count;
  to[a.channels] = sum.first();
  to[2 * a.channels] = sum.second();
}
// What another block stored; nothing if there is no such part.
template <class A> GPU_FN A load_partial(const ChannelReduce& a, u32 part, i64 channel) {
  using Math = typename A::Math;
  if (part >= a.parts) return A{};
  const Math* from = reinterpret_cast<const Math*>(a.partials) + (i64)part * 3 * a.channels + channel;
  return A::of(load_coherent(from), load_coherent(from + a.channels), load_coherent(from + 2 * a.channels));
}

// What a channel's results need besides its sums, loaded before these are ready.
template <class T> struct WelfordResult {
  using Math = typename MathOf<T>::type;
  using Sum = Moments<Math>;
  T pivot;
  GPU_FN void load(const ChannelReduce& a, i64 channel) {
    pivot = reinterpret_cast<const T*>(a.input)[channel * a.spatial];
  }
  GPU_FN void store(const ChannelReduce& a, i64 channel, const Sum& sum) const {
    Math* to = reinterpret_cast<Math*>(a.sums);
    to[channel] = load_as<Math>(pivot) + sum.mean;
    to[a.channels + channel] = sum.m2 / sum.count;
    if (channel == 0) to[2 * a.channels] = (Math)(a.batch * a.spatial);
  }
};
template <class T> struct GradientResult {
  using Math = typename MathOf<T>::type;
  using Sum = SumsOf<T>;
  Math inv_std;
  GPU_FN void load(const ChannelReduce& a, i64 channel) { inv_std = reinterpret_cast<const Math*>(a.inv_std)[channel]; }
  GPU_FN void store(const ChannelReduce& a, i64 channel, const Sum& sum) const {
    Math* to = reinterpret_cast<Math*>(a.sums);
    to[channel] = sum.first();
    to[a.channels + channel] = sum.second();
    const Math of_bias[1] = {sum.first()}, of_weight[1] = {sum.second() * inv_std};
    if (a.grad_weight) store_values(a.grad_weight, a.weight_type, channel, of_weight);
    if (a.grad_bias) store_values(a.grad_bias, a.weight_type, channel, of_bias);
  }
};

// ---- what a thread adds up ------------------------------------------------------------------------------
// Of one channel, or `width` adjacent ones: differences from the thread's first element, and their squares. That
// element is one of those it counts, so the squares exceed the squared sum by at least an n-th: of n elements (some
// hundreds) the variance keeps all but n roundings even if the first is far from the others, and nothing is lost if it
// is not.
template <class Math, int width> struct ShiftedSums {
  Math first[width], sum[width], square[width];

  ShiftedSums() = default;
  template <class T> GPU_FN explicit ShiftedSums(const T (&x)[width]) { begin(x); }
  template <class T> GPU_FN void begin(const T (&x)[width]) {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      first[i] = load_as<Math>(x[i]);
      sum[i] = square[i] = Math(0);
    }
  }
  GPU_FN void add(int i, Math x) {
    const Math d = x - first[i];
    sum[i] += d;
    square[i] = fma(d, d, square[i]);
  }
  // share: one over count, where several channels have it. nan stays: maximum(0, nan) is nan.
  GPU_FN Moments<Math> moments(int i, Math count, Math share, Math pivot) const {
    const Math mean = sum[i] * share;
    return {count, first[i] - pivot + mean, maximum(Math(0), fma(-mean, sum[i], square[i]))};
  }
  GPU_FN Moments<Math> moments(int i, Math count, Math pivot) const {
    return moments(i, count, Math(1) / count, pivot);
  }
};

// ---- channels first -----------------------------------------------------------------------------------
// A thread's way through the vectors of one channel. `exact`: segments (one channel of one image) are whole vectors.
// Else a segment need not begin at a multiple of 16 bytes: vectors do, and those at its ends hold elements of its
// neighbours too, which are left out.
template <class T, bool exact> struct SegmentWalk {
  static constexpr int width = vector_width<T>;
  static constexpr u32 all = (1u << width) - 1;
  i64 at;      // bytes from the tensor's begin to the vector's, or else the segment's
  u32 vector;  // of the segment

  GPU_FN SegmentWalk(const ChannelReduce& a, u32 channel, u32 from) {
    const u32 segment = from / a.segment_vectors;
    vector = from - segment * a.segment_vectors;
    at = (segment * a.channels + channel) * a.spatial * (i64)sizeof(T) + (exact ? (i64)vector * 16 : 0);
  }
  GPU_FN void next(const ChannelReduce& a) {
    vector += a.step_vectors;
    at += a.step_bytes;
    if (vector >= a.segment_vectors) {
      vector -= a.segment_vectors;
      at += a.wrap_bytes;
    }
  }

  // One vector: where it begins, in bytes, and which of its elements are the segment's: bit i for element i.
  struct Piece {
    i64 at;
    u32 mask, count;
  };
  GPU_FN Piece piece(const ChannelReduce& a) const {
    if constexpr (exact) return {at, all, width};
    const u32 lead = (u32)(reinterpret_cast<u64>(a.input + at) & 15) / (u32)sizeof(T);
    const i32 end = (i32)((u32)a.spatial + lead - vector * width);
    const i32 first = vector ? 0 : (i32)lead, last = end < 0 ? 0 : end < width ? end : width;
    const i64 begin = at - lead * (i64)sizeof(T);
    if (last <= first) return {begin, 0, 0};
    return {begin + (i64)vector * 16, (1u << last) - (1u << first), (u32)(last - first)};
  }
  GPU_FN Packed<T, width> load(const ChannelReduce& a, const u8* tensor, const Piece& piece, bool aligned) const {
    const T* p = reinterpret_cast<const T*>(tensor + piece.at);
    if (exact || (aligned && piece.at >= 0 && piece.at + 16 <= a.batch * a.channels * a.spatial * (i64)sizeof(T)))
      return load_packed<width>(p);
    Vector<T, width> x{};
    GPU_UNROLL_FOR (int i = 0; i < width; ++i)
      if (piece.mask >> i & 1) x.v[i] = p[i];
    return bit_cast<Packed<T, width>>(x);
  }
};
template <class T> struct ChannelPlace {
  u32 channel, part, begin, end;  // vectors: the thread's first one, the end of its part's
  GPU_FN explicit ChannelPlace(const ChannelReduce& a) {
    part = block_x() / (u32)a.channels;
    channel = block_x() - part * (u32)a.channels;
    const u32 vectors = (u32)a.batch * a.segment_vectors, from = part * a.part_vectors;
    end = vectors - from < a.part_vectors ? vectors : from + a.part_vectors;
    begin = from + thread_x();
  }
  GPU_FN u32 count() const { return begin < end ? (end - begin - 1) / block_size_x() + 1 : 0; }
};

template <class Result> GPU_FN void finish_channel(const ChannelReduce& a, typename Result::Sum mine, u32 channel,
                                                   u32 part) {
  using Sum = typename Result::Sum;
  Result result;
  result.load(a, channel);
  GPU_SHARED(u32, is_last, 1);
  mine = block_merge(mine);
  if (a.parts > 1) {
    if (thread_x() == 0) store_partial(a, part, channel, mine);
    if (!is_last_of(a.counters + channel, a.parts, is_last)) return;
    mine = load_partial<Sum>(a, thread_x(), channel);
    for (u32 p = thread_x() + block_size_x(); p < a.parts; p += block_size_x())
      mine.merge(load_partial<Sum>(a, p, channel));
    mine = block_merge(mine);
  }
  if (thread_x() == 0) result.store(a, channel, mine);
}

template <class T, bool exact> GPU_FN Moments<typename MathOf<T>::type> welford_of_thread(
    const ChannelReduce& a, const ChannelPlace<T>& place) {
  using Math = typename MathOf<T>::type;
  using Walk = SegmentWalk<T, exact>;
  constexpr int together = exact ? 4 : 2;
  u32 count = place.count();
  if (count == 0) return {};
  Walk walk(a, place.channel, place.begin);
  while (!exact && count && walk.piece(a).count == 0) {
    walk.next(a);
    --count;
  }
  if (count == 0) return {};
  T first{};
  if constexpr (!exact) {
    const i64 at = walk.piece(a).at;
    first = *reinterpret_cast<const T*>(a.input + (at > walk.at ? at : walk.at));
  }
  Packed<T, Walk::width> x[together];
  u32 masks[together], elements = exact ? count * Walk::width : 0;
  ShiftedSums<Math, 1> sums;
  const auto load = [&](u32 k) {
    const auto piece = walk.piece(a);
    masks[k] = piece.mask;
    if (!exact) elements += piece.count;
    x[k] = walk.load(a, a.input, piece, true);
    walk.next(a);
  };
  const auto start = [&] {
    Math values[Walk::width] = {load_as<Math>(first)};
    if constexpr (exact) unpack_values<T>(values, x[0]);
    const Math one[1] = {values[0]};
    sums.begin(one);
  };
  const auto add = [&](u32 k) {
    Math values[Walk::width];
    unpack_values<T>(values, x[k]);
    GPU_UNROLL_FOR (int i = 0; i < Walk::width; ++i)
      sums.add(0, exact || masks[k] >> i & 1 ? values[i] : sums.first[0]);
  };
  stream_vectors<together>(count, load, start, add);
  WelfordResult<T> channel;
  channel.load(a, place.channel);
  return sums.moments(0, (Math)elements, load_as<Math>(channel.pivot));
}
// Blocks: parts * channels, those of one part side by side.
template <class T> GPU_FN void welford_channels_first(const ChannelReduce& a) {
  const ChannelPlace<T> place(a);
  const auto mine = a.exact ? welford_of_thread<T, true>(a, place) : welford_of_thread<T, false>(a, place);
  finish_channel<WelfordResult<T>>(a, mine, place.channel, place.part);
}

template <class T, bool exact> GPU_FN SumsOf<T> gradients_of_thread(const ChannelReduce& a,
                                                                    const ChannelPlace<T>& place,
                                                                    typename MathOf<T>::type mean) {
  using Math = typename MathOf<T>::type;
  using Walk = SegmentWalk<T, exact>;
  constexpr int together = 2;
  if (place.begin >= place.end) return {};
  Walk walk(a, place.channel, place.begin);
  Packed<T, Walk::width> x[together], dy[together];
  u32 masks[together];
  Math of_dy[together] = {}, of_dy_xmu[together] = {};
  const auto load = [&](u32 k) {
    const auto piece = walk.piece(a);
    masks[k] = piece.mask;
    x[k] = walk.load(a, a.input, piece, true);
    dy[k] = walk.load(a, a.grad_output, piece, a.same_alignment != 0);
    walk.next(a);
  };
  const auto add = [&](u32 k) {
    Math values[Walk::width], gradients[Walk::width];
    unpack_values<T>(values, x[k]);
    unpack_values<T>(gradients, dy[k]);
    GPU_UNROLL_FOR (int i = 0; i < Walk::width; ++i) {
      const bool counts = exact || masks[k] >> i & 1;
      const Math g = counts ? gradients[i] : Math(0);
      of_dy[k] += g;
      of_dy_xmu[k] = fma(g, counts ? values[i] - mean : Math(0), of_dy_xmu[k]);
    }
  };
  stream_vectors<together>(place.count(), load, [] {}, add);
  return SumsOf<T>::of(Math(0), of_dy[0] + of_dy[1], of_dy_xmu[0] + of_dy_xmu[1]);
}
template <class T> GPU_FN void gradients_channels_first(const ChannelReduce& a) {
  using Math = typename MathOf<T>::type;
  const ChannelPlace<T> place(a);
  const Math mean = reinterpret_cast<const Math*>(a.mean)[place.channel];
  const auto mine =
      a.exact ? gradients_of_thread<T, true>(a, place, mean) : gradients_of_thread<T, false>(a, place, mean);
  finish_channel<GradientResult<T>>(a, mine, place.channel, place.part);
}

// ---- channels last --------------------------------------------------------------------------------------
// A thread's place: `width` adjacent channels, and every lanes-th row of its part.
template <int width> struct ColumnPlace {
  u32 column_block, part, lanes;
  u32 channel;  // the first of the thread's
  u32 count;    // rows
  i64 index;    // of its first element

  GPU_FN explicit ColumnPlace(const ChannelReduce& a) {
    part = block_x() / a.column_blocks;
    column_block = block_x() - part * a.column_blocks;
    const u32 column = thread_x() & (a.columns - 1), lane = thread_x() / a.columns;
    lanes = block_size_x() / a.columns;
    channel = (column_block * a.columns + column) * width;
    const i64 begin = part * a.part_rows, left = a.batch - begin;
    const u32 rows = (u32)(left < a.part_rows ? left : a.part_rows);
    count = channel < a.channels && lane < rows ? (rows - lane - 1) / lanes + 1 : 0;
    index = (begin + lane) * a.channels + channel;
  }
};

// Merges the lanes of a block for each of its channels; in the launch's last block, the parts too. All blocks end at
// once, and memory is idle meanwhile: it is one pass over what is merged, by the same few instructions both times.
// Threads of a block are a multiple of its channels; launches have at most 1.5 parts a lane unless the width is 1.
template <class Result, int width> GPU_FN void finish_columns(const ChannelReduce& a, const ColumnPlace<width>& at,
                                                              const typename Result::Sum (&mine)[width]) {
  using Sum = typename Result::Sum;
  using Math = typename Sum::Math;
  constexpr u32 apart = 4;  // keeps adjacent channels of a lane out of one bank
  GPU_SHARED(Math, firsts, (channel_threads + apart) * width);
  GPU_SHARED(Math, seconds, (channel_threads + apart) * width);
  GPU_SHARED(Math, counts, channel_threads);
  GPU_SHARED(u32, is_last, 1);
  const u32 threads = block_size_x(), t = thread_x(), pitch = threads + apart;
  const auto put = [&](u32 to, int i, const Sum& sum) {  // to: lane * columns + column
    if (i == 0) counts[to] = sum.count;
    firsts[i * pitch + to] = sum.first();
    seconds[i * pitch + to] = sum.second();
  };
  // Adjacent lanes of a warp take one channel.
  const u32 channels = a.columns * width;
  u32 groups = warp_size;
  while (groups * channels > threads) groups /= 2;
  const u32 q = t / groups, group = t - q * groups, column = q & (a.columns - 1), element = q / a.columns;
  const u32 channel = (at.column_block * a.columns + column) * width + element;
  const bool stores = group == 0 && q < channels && channel < a.channels;
  Result result{};  // compilers do not see that only what is loaded is stored
  if (stores) result.load(a, channel);
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) put(t, i, mine[i]);
  u32 lanes = at.lanes;
  for (bool whole = a.parts <= 1;; whole = true) {
    const bool merges = q < channels;
    const Math* const first = firsts + element * pitch + column;
    const Math* const second = seconds + element * pitch + column;
    sync_threads();
    Merging<Sum> merged(merges ? first[0] : Math(0));
    constexpr u32 together = 4;
    for (u32 lane = group; lane < (merges ? lanes : 0); lane += together * groups) {
      Sum x[together];
      GPU_UNROLL_FOR (u32 k = 0; k < together; ++k) {
        const u32 from = (lane + k * groups) * a.columns;
        x[k] = lane + k * groups < lanes ? Sum::of(counts[from + column], first[from], second[from]) : Sum{};
      }
      GPU_UNROLL_FOR (u32 k = 0; k < together; ++k) merged.take(x[k]);
    }
    const Sum total = merged.result(groups);
    if (whole) {
      if (stores) result.store(a, channel, total);
      return;
    }
    if (stores) store_partial(a, at.part, channel, total);
    if (!is_last_of(a.counters + at.column_block, a.parts, is_last)) return;
    // A warp loads adjacent channels, each thread all it needs at once.
    lanes = threads / channels;
    const u32 lane = t / channels, c = t - lane * channels, of = at.column_block * channels + c;
    constexpr u32 most = width + width / 2;
    Sum parts[most];
    GPU_UNROLL_FOR (u32 k = 0; k < most; ++k)
      parts[k] = of < a.channels ? load_partial<Sum>(a, lane + k * lanes, of) : Sum{};
    Merging<Sum> sum(parts[0].first());
    GPU_UNROLL_FOR (u32 k = 0; k < most; ++k) sum.take(parts[k]);
    if constexpr (width == 1)
      for (u32 part = lane + lanes; of < a.channels && part < a.parts; part += lanes)
        sum.take(load_partial<Sum>(a, part, of));
    put(lane * a.columns + c / width, c % width, sum.result(1));
  }
}

// Blocks: parts * column_blocks, those of one part side by side.
template <class T, int width> GPU_FN void welford_channels_last(const ChannelReduce& a) {
  using Math = typename MathOf<T>::type;
  constexpr int together = sizeof(T) == 8 ? 2 : 4;
  const ColumnPlace<width> at(a);
  Moments<Math> mine[width] = {};
  if (at.count) {
    const u8* p = a.input + at.index * (i64)sizeof(T);
    Packed<T, width> x[together];
    ShiftedSums<Math, width> sums;
    const auto load = [&](u32 k) {
      x[k] = load_packed<width>(reinterpret_cast<const T*>(p));
      p += a.step_bytes;
    };
    const auto start = [&] {
      Math first[width];
      unpack_values<T>(first, x[0]);
      sums.begin(first);
    };
    const auto add = [&](u32 k) {
      Math values[width];
      unpack_values<T>(values, x[k]);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) sums.add(i, values[i]);
    };
    stream_vectors<together>(at.count, load, start, add);
    Math pivot[width];
    unpack_values<T>(pivot, load_packed<width>(reinterpret_cast<const T*>(a.input) + at.channel));
    const Math count = (Math)at.count, share = Math(1) / count;
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) mine[i] = sums.moments(i, count, share, pivot[i]);
  }
  finish_columns<WelfordResult<T>>(a, at, mine);
}

// Bits of `width` elements of a mask, the first one lowest. They lie in one byte: index is a multiple of width.
template <int width> GPU_FN u32 load_bits(const u8* bitmask, u64 index) {
  const u32 byte = bitmask[index / 8];
  return width == 8 ? byte : byte >> ((u32)index & 7);
}

// masked: elements of grad_output whose bit is not set are 0.
template <class T, int width, bool masked = false> GPU_FN void gradients_channels_last(const ChannelReduce& a) {
  using Math = typename MathOf<T>::type;
  constexpr int together = 2;
  const ColumnPlace<width> at(a);
  SumsOf<T> mine[width] = {};
  if (at.count) {
    i64 offset = at.index * (i64)sizeof(T);  // bytes
    Math mean[width];
    Packed<T, width> x[together], dy[together];
    u32 bits[together];
    const auto load = [&](u32 k) {
      x[k] = load_packed<width>(reinterpret_cast<const T*>(a.input + offset));
      dy[k] = load_packed<width>(reinterpret_cast<const T*>(a.grad_output + offset));
      if constexpr (masked) bits[k] = load_bits<width>(a.bitmask, (u64)offset / sizeof(T));
      offset += a.step_bytes;
    };
    const auto start = [&] {
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) mean[i] = reinterpret_cast<const Math*>(a.mean)[at.channel + i];
    };
    const auto add = [&](u32 k) {
      Math values[width], gradients[width];
      unpack_values<T>(values, x[k]);
      unpack_values<T>(gradients, dy[k]);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        if constexpr (masked) gradients[i] = bits[k] >> i & 1 ? gradients[i] : Math(0);
        mine[i].sums[0] += gradients[i];
        mine[i].sums[1] = fma(gradients[i], values[i] - mean[i], mine[i].sums[1]);
      }
    };
    stream_vectors<together>(at.count, load, start, add);
  }
  finish_columns<GradientResult<T>>(a, at, mine);
}
#endif
}  // namespace gpu

// For each element type a kernel for channels first, one for channels last, and one for channels last whose vectors
// do not fit.
#define CHANNEL_REDUCE_KERNEL(name, threads, blocks, ...)                          \
  extern "C" GPU_KERNEL(threads, blocks) void name(gpu::ChannelReduce arguments) { \
    gpu::await_previous_kernel();                                                  \
    __VA_ARGS__(arguments);                                                        \
  }                                                                                \
  GPU_REGISTER(name)
#define CHANNEL_REDUCE_KERNELS(op, function, name, T)                                    \
  CHANNEL_REDUCE_KERNEL(op##_first_##name, gpu::channel_threads, gpu::channel_blocks<T>, \
                        gpu::function##_channels_first<T>)                               \
  CHANNEL_REDUCE_KERNEL(op##_last_##name, gpu::channel_threads, gpu::channel_blocks<T>,  \
                        gpu::function##_channels_last<T, gpu::vector_width<T>>)          \
  CHANNEL_REDUCE_KERNEL(op##_last1_##name, gpu::channel_threads, gpu::channel_blocks<T>, \
                        gpu::function##_channels_last<T, 1>)
// The same for channels last with a mask.
#define MASKED_CHANNEL_REDUCE_KERNELS(op, function, name, T)                                    \
  CHANNEL_REDUCE_KERNEL(op##_masked_last_##name, gpu::channel_threads, gpu::channel_blocks<T>,  \
                        gpu::function##_channels_last<T, gpu::vector_width<T>, true>)           \
  CHANNEL_REDUCE_KERNEL(op##_masked_last1_##name, gpu::channel_threads, gpu::channel_blocks<T>, \
                        gpu::function##_channels_last<T, 1, true>)
#define CHANNEL_TYPES(KERNELS, ...)         \
  KERNELS(__VA_ARGS__, f32, float)          \
  KERNELS(__VA_ARGS__, f16, gpu::half)      \
  KERNELS(__VA_ARGS__, bf16, gpu::bfloat16) \
  KERNELS(__VA_ARGS__, f64, double)
