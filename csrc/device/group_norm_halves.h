// Group norm of float16 and bfloat16 images, channels last, that are small enough for shared memory. A block takes one
// image's strip: adjacent channels that make up whole groups. It copies the strip to shared memory once and works from
// there. A thread reads only what it copied itself, so the copies need no barrier. Groups have at least eight channels,
// so the eight adjacent channels of a thread belong to at most two groups.
#pragma once
#include "exchange.h"
#include "group_norm_tile.h"

namespace gpu {
#if !defined(GPU_HOST)
// One image's strip, and the thread's share of it: eight channels (a column) of every a.lanes-th pixel (a row).
struct HalvesItem {
  static constexpr u32 width = 8;
  u32 image, strip, column, lane;
  u32 group_channels, first_channel, first_group, groups;  // the strip's
  u32 channel;                                             // the thread's first one
  u32 group, split;  // its group, counted from the strip's first; channels from `split` on are of the next group
  u32 rows, most;    // of this thread; of the thread that has most
  i64 offset, step;  // in bytes: where the thread's first row is, and from one of its rows to the next

  GPU_FN HalvesItem(const GroupNorm& a, u32 item) {
    const u32 channels = (u32)a.channels, strip_channels = a.columns * width;
    image = item / a.strips;
    strip = item - image * a.strips;
    first_channel = strip * strip_channels;
    const u32 left_channels = channels - first_channel;
    group_channels = channels / (u32)a.groups;
    first_group = first_channel / group_channels;
    groups = (left_channels < strip_channels ? left_channels : strip_channels) / group_channels;
    lane = thread_x() / a.columns;
    column = thread_x() - lane * a.columns;
    const bool active = lane < a.lanes && column * width < left_channels;
    const u32 of_strip = active ? column * width : 0;
    channel = first_channel + of_strip;
    group = of_strip / group_channels;
    split = (group + 1) * group_channels - of_strip;
    rows = active ? rows_of(a, lane) : 0;
    most = rows_of(a, 0);
    offset = (((i64)image * a.spatial + lane) * a.channels + channel) * 2;
    step = (i64)a.lanes * a.channels * 2;
  }
  GPU_FN u32 rows_of(const GroupNorm& a, u32 of_lane) const {
    return of_lane < (u32)a.spatial ? ((u32)a.spatial - 1 - of_lane) / a.lanes + 1 : 0;
  }
  // each(i, whether channel i is of the thread's second group)
  template <class Each> GPU_FN void for_each_channel(const Each& each) const {
    GPU_UNROLL_FOR (u32 i = 0; i < width; ++i) each(i, i >= split);
  }
  GPU_FN u32 group_of_image(const GroupNorm& a, u32 g) const { return image * (u32)a.groups + first_group + g; }
  // The thread's second group, or the strip's last where there is none.
  GPU_FN u32 second_group() const { return group + 1 < groups ? group + 1 : group; }
};

// The weights or biases of the thread's channels, kept in the type that memory has them in.
struct HalvesAffine {
  Numbers<8> numbers;
  GPU_FN void load(const u8* from, i32 type, u32 channel) {
    if (from) numbers.load(from, type, channel);
  }
  GPU_FN void get(float (&x)[8], const u8* from, i32 type, float otherwise) const {
    if (from) numbers.get(x, type);
    else
      GPU_UNROLL_FOR (int i = 0; i < 8; ++i) x[i] = otherwise;
  }
};

// Calls put(k), which starts the copy of row k, for all of the thread's rows, in four shares; then meanwhile(); then,
// share by share as they arrive, take(k) for each row. Rows are few: of unrolled loops most would be the rest. begin()
// is called when the first share is there.
template <class Put, class Meanwhile, class Begin, class Take>
GPU_FN void stage_shares(const HalvesItem& at, const Put& put, const Meanwhile& meanwhile, const Begin& begin,
                         const Take& take) {
  constexpr u32 shares = 4;
  const u32 share = (at.most + shares - 1) / shares;
  const auto past = [&](u32 s) { return (s + 1) * share < at.rows ? (s + 1) * share : at.rows; };
  GPU_UNROLL_FOR (u32 s = 0; s < shares; ++s) {
    GPU_ROLLED_FOR(u32 k = s * share; k < past(s); ++k) put(k);
#if !defined(GPU_HIP)
    copy_async_commit();
#endif
  }
  meanwhile();
  GPU_UNROLL_FOR (u32 s = 0; s < shares; ++s) {
#if !defined(GPU_HIP)
    if (s == 0) copy_async_wait<3>();
    if (s == 1) copy_async_wait<2>();
    if (s == 2) copy_async_wait<1>();
    if (s == 3) copy_async_wait<0>();
#endif
    if (s == 0) begin();
    GPU_ROLLED_FOR(u32 k = s * share; k < past(s); ++k) take(k);
  }
}

// Sums over the thread's rows, for each of its channels. They are of differences from the first row: of the values
// themselves, large means would leave few digits.
struct HalvesMoments {
  static constexpr int width = 8;
  float first[width] = {}, sum[width] = {}, square[width] = {};

  GPU_FN void add(const float (&x)[width]) {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      const float d = x[i] - first[i];
      sum[i] += d;
      square[i] = fma(d, d, square[i]);
    }
  }
  // {mean, sum of squared deviations} of the first group's channels, then of the second's.
  GPU_FN Vector<float, 4> of_groups(const HalvesItem& at) const {
    if (at.rows == 0) return Vector<float, 4>{};
    const float n = (float)at.rows, share = 1.0f / n;
    const u32 of_first = at.split < width ? at.split : width;
    float mean[width], m2[width], apart[2] = {}, squares[2] = {};
    at.for_each_channel([&](u32 i, bool) {
      const float of_sum = sum[i] * share;
      m2[i] = maximum(0.0f, fma(-of_sum, sum[i], square[i]));
      mean[i] = first[i] + of_sum;
    });
    at.for_each_channel([&](u32 i, bool second) {
      apart[0] += second ? 0.0f : mean[i] - mean[0];
      apart[1] += second ? mean[i] - mean[width - 1] : 0.0f;
    });
    const float means[2] = {mean[0] + divide(apart[0], (float)of_first),
                            mean[width - 1] + divide(apart[1], maximum((float)(width - of_first), 1.0f))};
    at.for_each_channel([&](u32 i, bool second) {
      const float d = mean[i] - (second ? means[1] : means[0]), all = fma(n * d, d, m2[i]);
      squares[0] += second ? 0.0f : all;
      squares[1] += second ? all : 0.0f;
    });
    return Vector<float, 4>{{means[0], squares[0], means[1], squares[1]}};
  }
};

// Group g of the strip, from what threads have of it. For a whole warp together; each lane takes some threads' results.
GPU_FN Moments<float> merge_group(const GroupNorm& a, const HalvesItem& at, u32 g, const Vector<float, 4>* of_threads) {
  constexpr u32 width = HalvesItem::width;
  const u32 begin = g * at.group_channels, end = begin + at.group_channels, first = begin / width,
            columns = (end - 1) / width - first + 1;
  const Vector<float, 4> any = of_threads[first];
  Merging<Moments<float>> merging(first * width < begin ? any.v[2] : any.v[0]);
  for (u32 j = lane_id(); j < columns * a.lanes; j += warp_size) {
    const u32 lane = j / columns, column = first + j - lane * columns, low = column * width, high = low + width;
    const Vector<float, 4> x = of_threads[lane * a.columns + column];
    const bool second = low < begin;
    const u32 channels = (high < end ? high : end) - (second ? begin : low);
    merging.take({(float)(at.rows_of(a, lane) * channels), second ? x.v[2] : x.v[0], second ? x.v[3] : x.v[1]});
  }
  return merging.result(warp_size);
}

template <i32 type> GPU_FN void group_norm_forward_halves(const GroupNorm& a) {
  constexpr int width = 8;
  GPU_DYNAMIC_SHARED(float, memory);
  const u32 threads = block_size_x(), warp = thread_x() / warp_size, warps = threads / warp_size;
  Vector<float, 4>* const of_threads = reinterpret_cast<Vector<float, 4>*>(memory);
  Vector<float, 2>* const of_groups = reinterpret_cast<Vector<float, 2>*>(memory + 4 * threads);
  const TileSlots tile(reinterpret_cast<u8*>(of_groups + threads));
  const u32 items = (u32)(a.batch * a.strips);
  const bool silu = a.silu != 0;
  for (u32 item = block_x(); item < items; item += grid_x()) {
    const HalvesItem at(a, item);
    const u8* const from = a.input + at.offset;
    HalvesMoments moments;
    stage_shares(
        at, [&](u32 k) { tile.put(k, from + k * at.step); },
        [&] {
          if (a.weight) prefetch(a.weight + at.channel * bytes_of(a.weight_type));
          if (a.bias) prefetch(a.bias + at.channel * bytes_of(a.weight_type));
        },
        [&] {
          if (at.rows) tile.get<type>(moments.first, 0);
        },
        [&](u32 k) {
          float x[width];
          tile.get<type>(x, k);
          moments.add(x);
        });
    of_threads[thread_x()] = moments.of_groups(at);
    HalvesAffine weight, bias;
    weight.load(a.weight, a.weight_type, at.channel);
    bias.load(a.bias, a.weight_type, at.channel);
    sync_threads();
    for (u32 g = warp; g < at.groups; g += warps) {
      const Moments<float> sum = merge_group(a, at, g, of_threads);
      if (lane_id() != 0) continue;
      const float rstd = inverse_deviation(sum.m2, (float)a.spatial * (float)at.group_channels, (float)a.eps);
      of_groups[g] = Vector<float, 2>{{sum.mean, rstd}};
      reinterpret_cast<float*>(a.mean)[at.group_of_image(a, g)] = sum.mean;
      reinterpret_cast<float*>(a.rstd)[at.group_of_image(a, g)] = rstd;
    }
    sync_threads();
    float origin[width], scale[width], shift[width];
    weight.get(scale, a.weight, a.weight_type, 1.0f);
    bias.get(shift, a.bias, a.weight_type, 0.0f);
    const Vector<float, 2> first = of_groups[at.group], second = of_groups[at.second_group()];
    const float origins[2] = {origin_of(first.v[0], first.v[1]), origin_of(second.v[0], second.v[1])};
    at.for_each_channel([&](u32 i, bool is_second) {
      origin[i] = is_second ? origins[1] : origins[0];
      scale[i] *= is_second ? second.v[1] : first.v[1];
      shift[i] = fma(origin[i] - (is_second ? second.v[0] : first.v[0]), scale[i], shift[i]);
    });
    u8* to = a.output + at.offset;
    GPU_ROLLED_FOR(u32 k = 0; k < at.rows; ++k, to += at.step) {
      float x[width];
      tile.get<type>(x, k);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = fma(x[i] - origin[i], scale[i], shift[i]);
      activate<float, false>(x, silu);
      *reinterpret_cast<Words*>(to) = pack(x, type);
    }
  }
}

// Sums of the backward in shared memory. Each of a thread's eight channels has two: of g, the gradient before SiLU, and
// of g * x^, where x^ is the normalized input. Arrays of floats, one behind another:
//   of_threads   [16][pitch]       rows are some columns longer than there are threads: no memory bank is asked twice
//   of_helpers   [helpers][all]    parts of the strip's sums
//   of_channels  [16][columns]     the strip's sums
struct HalvesSums {
  static constexpr u32 numbers = 16;
  float *of_threads, *of_helpers, *of_channels;
  u32 pitch, columns, all;  // all: 16 * columns, the strip's sums
  GPU_FN HalvesSums(const GroupNorm& a, float* memory)
      : of_threads(memory), pitch(block_size_x() + a.columns), columns(a.columns), all(numbers * a.columns) {
    of_helpers = of_threads + numbers * pitch;
    of_channels = of_helpers + block_size_x() + all;
  }
  GPU_FN u8* rest() const { return reinterpret_cast<u8*>(of_channels + all); }
  // For channel q of the strip: the sum of g (which = 0) or of g * x^ (1).
  GPU_FN float get(u32 which, u32 q) const { return of_channels[(which * 8 + q % 8) * columns + q / 8]; }

  // From the threads' sums the strip's. For the whole block together: as many threads (helpers) as there are for each
  // of the strip's sums, at least one, add up parts of it.
  GPU_FN void add_up(u32 lanes) const {
    const u32 helpers = block_size_x() / all, helper = thread_x() / all, u = thread_x() - helper * all,
              number = u / columns;
    sync_threads();
    if (helper < helpers) {
      const float* const from = of_threads + number * pitch + u - number * columns;
      float sum = 0.0f;
      for (u32 lane = helper; lane < lanes; lane += helpers) sum += from[lane * columns];
      of_helpers[thread_x()] = sum;
    }
    sync_threads();
    if (helper == 0) {
      float sum = of_helpers[u];
      for (u32 other = 1; other < helpers; ++other) sum += of_helpers[other * all + u];
      of_channels[u] = sum;
    }
    sync_threads();
  }
};

// The gradients of the strip's weights and biases: sums of what the blocks of all images wrote. The last of these
// blocks does it.
GPU_FN void finish_strip(const GroupNorm& a, const HalvesItem& at) {
  const u32 channels = at.groups * at.group_channels, images = (u32)a.batch;
  constexpr u32 at_once = 16;
  for (u32 u = thread_x(); u < 2 * channels; u += block_size_x()) {
    const u32 which = u / channels, channel = at.first_channel + u - which * channels;
    const float* const from = reinterpret_cast<const float*>(a.channel_partials) + (i64)which * a.channels + channel;
    float sum = 0.0f;
    for (u32 image = 0; image < images; image += at_once) {
      float x[at_once] = {};
      GPU_UNROLL_FOR (u32 k = 0; k < at_once; ++k)
        if (image + k < images) x[k] = load_coherent(from + (i64)(image + k) * 2 * a.channels);
      float some = 0.0f;  // added together first: one long chain of sums would round more
      GPU_UNROLL_FOR (u32 k = 0; k < at_once; ++k) some += x[k];
      sum += some;
    }
    const float of_channel[1] = {sum};
    if (u8* const to = which ? a.grad_weight : a.grad_bias) store_values(to, a.weight_type, channel, of_channel);
  }
}

// Leaves the sums of the image's strip for finish_strip(), or for the launch that follows.
GPU_FN void leave_channels(const GroupNorm& a, const HalvesItem& at, const HalvesSums& sums) {
  float* const to = reinterpret_cast<float*>(a.channel_partials) + at.first_channel;
  if (thread_x() >= sums.all) return;
  const u32 which = thread_x() / (a.columns * at.width), q = thread_x() - which * a.columns * at.width;
  if (q < at.groups * at.group_channels) to[((i64)at.image * 2 + which) * a.channels + q] = sums.get(which, q);
}

// A group's averages of g * weight and of g * weight * x^. For a whole warp together; each lane takes some channels.
GPU_FN void average_group(const GroupNorm& a, const HalvesItem& at, u32 g, const HalvesSums& sums,
                          Vector<float, 2>& averages) {
  float one = 0.0f, along = 0.0f;
  for (u32 q = g * at.group_channels + lane_id(); q < (g + 1) * at.group_channels; q += warp_size) {
    const float weight = affine(a.weight, a.weight_type, at.first_channel + q, 1.0f);
    one = fma(sums.get(0, q), weight, one);
    along = fma(sums.get(1, q), weight, along);
  }
  one = warp_reduce<Sum>(one);
  along = warp_reduce<Sum>(along);
  const float by_count = 1.0f / ((float)a.spatial * (float)at.group_channels);
  if (lane_id() == 0) averages = Vector<float, 2>{{one * by_count, along * by_count}};
}

// Of the thread's channels. scale: rstd * weight.
struct HalvesConstants {
  static constexpr int width = 8;
  float mean[width], scale[width], bias[width], rstd[2];  // rstd: of the thread's two groups

  GPU_FN void load(const GroupNorm& a, const HalvesItem& at) {
    HalvesAffine of_weight, of_bias;
    of_weight.load(a.weight, a.weight_type, at.channel);
    of_bias.load(a.bias, a.weight_type, at.channel);
    const float *const means = reinterpret_cast<const float*>(a.mean), *const rstds =
                                                                           reinterpret_cast<const float*>(a.rstd);
    const u32 group = at.group_of_image(a, at.group), second_group = at.group_of_image(a, at.second_group());
    const float both[2] = {means[group], means[second_group]};
    rstd[0] = rstds[group];
    rstd[1] = rstds[second_group];
    of_weight.get(scale, a.weight, a.weight_type, 1.0f);
    of_bias.get(bias, a.bias, a.weight_type, 0.0f);
    at.for_each_channel([&](u32 i, bool second) {
      mean[i] = second ? both[1] : both[0];
      scale[i] *= second ? rstd[1] : rstd[0];
    });
  }
};

// The thread's rows of the input and of the output's gradient, in shared memory.
template <i32 type> struct HalvesRows {
  static constexpr int width = 8;
  TileSlots inputs, grads;

  GPU_FN HalvesRows(u8* memory, const HalvesItem& at)
      : inputs(memory), grads(memory + (i64)at.most * block_size_x() * group_norm_vector_bytes) {}
  // Row k: x less its mean, and g, the gradient before SiLU.
  GPU_FN void gradient(float (&x)[width], float (&g)[width], u32 k, const HalvesConstants& constants, bool silu) const {
    float z[width];
    inputs.template get<type>(x, k);
    grads.template get<type>(g, k);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      x[i] -= constants.mean[i];
      z[i] = fma(x[i], constants.scale[i], constants.bias[i]);
    }
    gradient_of_z<float, false>(g, z, silu);
  }
};

// Brings the rows to shared memory, and leaves the thread's sums there.
template <i32 type> GPU_FN void sum_rows(const GroupNorm& a, const HalvesItem& at, const HalvesRows<type>& rows,
                                         HalvesConstants& constants, const HalvesSums& sums) {
  constexpr int width = 8;
  const bool silu = a.silu != 0;
  float of_one[width] = {}, of_x[width] = {};
  stage_shares(
      at,
      [&](u32 k) {
        rows.inputs.put(k, a.input + at.offset + k * at.step);
        rows.grads.put(k, a.grad_output + at.offset + k * at.step);
      },
      [&] { constants.load(a, at); }, [] {},
      [&](u32 k) {
        float x[width], g[width];
        rows.gradient(x, g, k, constants, silu);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
          of_one[i] += g[i];
          of_x[i] = fma(g[i], x[i], of_x[i]);
        }
      });
  at.for_each_channel([&](u32 i, bool second) {
    sums.of_threads[i * sums.pitch + thread_x()] = of_one[i];
    sums.of_threads[(width + i) * sums.pitch + thread_x()] = of_x[i] * (second ? constants.rstd[1] : constants.rstd[0]);
  });
}

// The input's gradient, from the averages of the strip's groups.
template <i32 type> GPU_FN void write_gradient(const GroupNorm& a, const HalvesItem& at, const HalvesRows<type>& rows,
                                               const HalvesConstants& constants, const Vector<float, 2>* of_groups) {
  constexpr int width = 8;
  const bool silu = a.silu != 0;
  const Vector<float, 2> first = of_groups[at.group], second = of_groups[at.second_group()];
  float of_one[width], of_x[width];
  at.for_each_channel([&](u32 i, bool is_second) {
    const float r = is_second ? constants.rstd[1] : constants.rstd[0];
    of_one[i] = r * (is_second ? second.v[0] : first.v[0]);
    of_x[i] = r * r * (is_second ? second.v[1] : first.v[1]);
  });
  u8* to = a.output + at.offset;
  GPU_ROLLED_FOR(u32 k = 0; k < at.rows; ++k, to += at.step) {
    float x[width], g[width];
    rows.gradient(x, g, k, constants, silu);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) g[i] = fma(g[i], constants.scale[i], -fma(x[i], of_x[i], of_one[i]));
    *reinterpret_cast<Words*>(to) = pack(g, type);
  }
}

template <i32 type> GPU_FN void group_norm_backward_halves(const GroupNorm& a) {
  GPU_DYNAMIC_SHARED(float, memory);
  GPU_SHARED(u32, is_last, 1);
  const u32 threads = block_size_x(), warp = thread_x() / warp_size, warps = threads / warp_size;
  Vector<float, 2>* const of_groups = reinterpret_cast<Vector<float, 2>*>(memory);
  const HalvesSums sums(a, memory + 2 * threads);
  const u32 items = (u32)(a.batch * a.strips);
  for (u32 item = block_x(); item < items; item += grid_x()) {
    const HalvesItem at(a, item);
    const HalvesRows<type> rows(sums.rest(), at);
    HalvesConstants constants;
    sum_rows<type>(a, at, rows, constants, sums);
    sums.add_up(a.lanes);
    if (a.channel_partials) leave_channels(a, at, sums);
    for (u32 g = warp; g < at.groups; g += warps) average_group(a, at, g, sums, of_groups[g]);
    sync_threads();
    write_gradient<type>(a, at, rows, constants, of_groups);
    if (a.counters && is_last_of(a.counters + at.strip, (u32)a.batch, is_last)) finish_strip(a, at);
  }
}
#endif
}  // namespace gpu
