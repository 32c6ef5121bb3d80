// Group norm, channels last, in two launches. A thread stays with `width` adjacent channels, whose numbers it keeps,
// and goes down the rows of its block's part.
#pragma once
#include "group_norm_finish.h"
#include "group_norm_strip.h"

namespace gpu {
#if !defined(GPU_HOST)
// Rows of a thread that are on their way together: with these, and the blocks that run at once, 48 KB a multiprocessor,
// which is what a Hopper needs to keep its memory busy.
constexpr int rows_at_once = 4, rows_at_once_backward = 3;

// Rows of the thread, several on their way at once: each(values of the input, of the gradient, the element's index).
template <i32 type, int width, int together, bool reads_grad, class Math, class Each>
GPU_FN void for_each_row(const GroupNorm& a, u32 rows, i64 element, const Each& each) {
  const i64 step = (i64)a.lanes * a.channels;
  const auto run = [&](u32 count) {
    Loaded<type, width> inputs[together], gradients[reads_grad ? together : 1];
    GPU_UNROLL_FOR (u32 k = 0; k < together; ++k) {
      if (k >= count) continue;
      inputs[k].load(a.input, a.input_type, element + k * step);
      if constexpr (reads_grad) gradients[k].load(a.grad_output, a.input_type, element + k * step);
    }
    GPU_UNROLL_FOR (u32 k = 0; k < together; ++k) {
      if (k >= count) continue;
      Math x[width], dy[width];
      inputs[k].get(x);
      if constexpr (reads_grad) gradients[k].get(dy);
      each(x, dy, element + k * step);
    }
    element += together * step;
  };
  u32 left = rows;
  for (; left >= together; left -= together) run(together);
  if (left) run(left);
}

GPU_FN i64 group_norm_items(const GroupNorm& a) { return a.batch * a.parts * a.strips; }

// Where a group of an image leaves what it has in this strip and part.
template <class Math, int width> GPU_FN Math* group_slot(const GroupNorm& a, const StripItem<width>& at, u32 group) {
  const u32 of_part = a.slots / a.parts,
            slot = (u32)at.part * of_part + at.strip - group * at.group_channels / at.strip_channels;
  return reinterpret_cast<Math*>(a.group_partials) + ((at.image * a.groups + group) * a.slots + slot) * 2;
}
// merge(a slot's two numbers, elements that they are of) for the slots of a group that are this lane's.
template <class Math, int width, class Merge>
GPU_FN void for_each_slot(const GroupNorm& a, const StripItem<width>& at, u32 group, const Merge& merge) {
  const Math* const from =
      reinterpret_cast<const Math*>(a.group_partials) + (at.image * a.groups + group) * a.slots * 2;
  const u32 of_part = a.slots / a.parts, begin = group * at.group_channels, end = begin + at.group_channels;
  const u32 first = begin / at.strip_channels, last = (end - 1) / at.strip_channels;
  for (u32 slot = lane_id(); slot < a.slots; slot += warp_size) {
    const u32 part = slot / of_part, strip = first + slot - part * of_part;
    if (strip > last) continue;
    const u32 strip_begin = strip * at.strip_channels, strip_end = strip_begin + at.strip_channels;
    const u32 channels = (end < strip_end ? end : strip_end) - (begin > strip_begin ? begin : strip_begin);
    const i64 left = a.spatial - part * a.part_size, rows = left < a.part_size ? left : a.part_size;
    merge(from[2 * slot], from[2 * slot + 1], (Math)channels * (Math)rows);
  }
}

// Of a part of a strip: of each of its groups the mean (less the group's pivot) and squared deviations.
template <i32 type, int width> GPU_FN void group_norm_statistics_last(const GroupNorm& a) {
  using Math = typename GroupNormMath<type>::Type;
  GPU_DYNAMIC_SHARED(Math, memory);
  const GroupNormShared<Math, width> shared(memory);
  for (i64 item = block_x(); item < group_norm_items(a); item += grid_x()) {
    const StripItem<width> at(a, item, a.parts, a.part_size);
    Moments<Math> mine[width] = {};
    const u32 rows = at.rows(a);
    if (rows) {
      Math x[width], pivot[width] = {};
      const i64 element = at.element(a);
      load_values(x, a.input, known_type<type>(a.input_type), element);
      ShiftedSums<Math, width> sums(x);
      for_each_row<type, width, rows_at_once, false, Math>(a, rows, element,
                                                           [&](const Math(&row)[width], const auto&, i64) {
                                                             GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
                                                               const Math d = row[i] - sums.first[i];
                                                               sums.sum[i] += d;
                                                               sums.square[i] = fma(d, d, sums.square[i]);
                                                             }
                                                           });
      group_pivots<type>(pivot, a, at);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) mine[i] = sums.moments(i, (Math)rows, pivot[i]);
    }
    const StripMerge<Moments<Math>, width> merged(a, shared, mine);
    for_each_group(at, merged, Unchanged(), [&](u32 group, const Moments<Math>& sum) {
      Math* const to = group_slot<Math>(a, at, group);
      to[0] = sum.mean;
      to[1] = sum.m2;
    });
  }
}

// Of each of the thread's channels, from the mean and 1 / standard deviation of each group of the strip.
template <class Math, int width> struct ForwardConstants {
  Math origin[width], scale[width], shift[width];

  GPU_FN ForwardConstants(const GroupNorm& a, const StripItem<width>& at, const Math* means, const Math* rstds) {
    load_affine(scale, a.weight, a.weight_type, at, Math(1));
    load_affine(shift, a.bias, a.weight_type, at, Math(0));
    at.for_each_channel([&](int i, u32 group) {
      const Math mean = means[group - at.first_group], rstd = rstds[group - at.first_group];
      origin[i] = origin_of(mean, rstd);
      scale[i] *= rstd;
      shift[i] = fma(origin[i] - mean, scale[i], shift[i]);
    });
  }
  GPU_FN void normalize(Math (&y)[width], const Math (&x)[width]) const {
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) y[i] = fma(x[i] - origin[i], scale[i], shift[i]);
  }
};

template <i32 type, int width> GPU_FN void group_norm_apply_last(const GroupNorm& a) {
  using Math = typename GroupNormMath<type>::Type;
  constexpr bool exact = type != type_f16 && type != type_bf16;
  GPU_DYNAMIC_SHARED(Math, memory);
  const GroupNormShared<Math, width> shared(memory);
  const i64 items = group_norm_items(a);
  for (i64 item = block_x(); item < items; item += grid_x()) {
    const StripItem<width> at(a, items - 1 - item, a.parts, a.part_size);
    sync_threads();
    for (u32 group = at.first_group + thread_x() / warp_size; group <= at.last_group;
         group += block_size_x() / warp_size) {
      Moments<Math> sum{};
      for_each_slot<Math>(a, at, group, [&](Math mean, Math m2, Math count) { sum.merge({count, mean, m2}); });
      sum = warp_merge(sum);
      if (lane_id() != 0) continue;
      const GroupStatistics<Math> found(a, group_pivot<type, Math>(a, at.image, group, at.group_channels), sum.m2,
                                        sum.mean, at.group_channels);
      shared.group_first[group - at.first_group] = found.mean;
      shared.group_second[group - at.first_group] = found.rstd;
      if (at.part == 0 && group * at.group_channels >= at.first_channel) found.store(a, at.image, group);
    }
    sync_threads();
    const ForwardConstants<Math, width> constants(a, at, shared.group_first, shared.group_second);
    const bool silu = a.silu != 0;
    for_each_row<type, width, rows_at_once, false, Math>(
        a, at.rows(a), at.element(a), [&](const Math(&x)[width], const auto&, i64 element) {
          Math y[width];
          constants.normalize(y, x);
          activate<Math, exact>(y, silu);
          store_values(a.output, known_type<type>(a.input_type), element, y);
        });
  }
}

// ---- backward -----------------------------------------------------------------------------------------
// Of each of the thread's channels. scale: rstd * weight.
template <class Math, int width> struct BackwardConstants {
  Math mean[width], scale[width], bias[width];

  GPU_FN BackwardConstants(const GroupNorm& a, const StripItem<width>& at) {
    load_affine(scale, a.weight, a.weight_type, at, Math(1));
    load_affine(bias, a.bias, a.weight_type, at, Math(0));
    at.for_each_channel([&](int i, u32 group) {
      mean[i] = reinterpret_cast<const Math*>(a.mean)[at.image * a.groups + group];
      scale[i] *= rstd(a, at, group);
    });
  }
  GPU_FN static Math rstd(const GroupNorm& a, const StripItem<width>& at, u32 group) {
    return reinterpret_cast<const Math*>(a.rstd)[at.image * a.groups + group];
  }
  // x less its mean in place of x, g in place of dy.
  template <bool exact> GPU_FN void gradient(Math (&x)[width], Math (&dy)[width], bool silu) const {
    Math z[width];
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] -= mean[i];
    if (silu)
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) z[i] = fma(x[i], scale[i], bias[i]);
    gradient_of_z<Math, exact>(dy, z, silu);
  }
};

template <class Math, bool exact> struct GroupNormSumsOf { using type = TwoSums<Math>; };
template <class Math> struct GroupNormSumsOf<Math, true> { using type = CarefulSums<Math>; };
template <class Math, bool exact> using GroupNormSums = typename GroupNormSumsOf<Math, exact>::type;

// A channel's sums of g and g * x^.
template <class Math, int width, bool exact> struct GradientSums {
  Math of_one[width] = {}, of_x[width] = {};

  GPU_FN void add(const BackwardConstants<Math, width>& constants, Math (&x)[width], Math (&dy)[width], bool silu) {
    constants.template gradient<exact>(x, dy, silu);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      of_one[i] += dy[i];
      of_x[i] = fma(dy[i], x[i], of_x[i]);
    }
  }
  GPU_FN void leave(GroupNormSums<Math, exact> (&sums)[width], const GroupNorm& a, const StripItem<width>& at) const {
    at.for_each_channel([&](int i, u32 group) {
      sums[i] = GroupNormSums<Math, exact>::of(Math(0), of_one[i],
                                               of_x[i] * BackwardConstants<Math, width>::rstd(a, at, group));
    });
  }
};
// The input's gradient from a group's sums over its number of elements.
template <class Math, int width, bool exact> struct InputGradient {
  const BackwardConstants<Math, width>& constants;
  Math of_one[width], of_x[width];

  GPU_FN InputGradient(const GroupNorm& a, const StripItem<width>& at, const BackwardConstants<Math, width>& constants_,
                       const Math* ones, const Math* xs)
      : constants(constants_) {
    at.for_each_channel([&](int i, u32 group) {
      const Math rstd = BackwardConstants<Math, width>::rstd(a, at, group);
      of_one[i] = rstd * ones[group - at.first_group];
      of_x[i] = rstd * rstd * xs[group - at.first_group];
    });
  }
  // In dy's place.
  GPU_FN void apply(Math (&x)[width], Math (&dy)[width], bool silu) const {
    constants.template gradient<exact>(x, dy, silu);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) dy[i] = fma(dy[i], constants.scale[i], -fma(x[i], of_x[i], of_one[i]));
  }
};
template <class A, int width>
GPU_FN void store_channel_sums(const GroupNorm& a, const StripItem<width>& at, const StripMerge<A, width>& merged) {
  using Math = typename A::Math;
  Math* const to = reinterpret_cast<Math*>(a.channel_partials) + (at.image * a.parts + at.part) * 2 * a.channels;
  for (u32 q = thread_x(); q < (u32)(at.past_channel - at.first_channel); q += block_size_x()) {
    const A sum = merged.merge_channel(q);
    to[at.first_channel + q] = sum.first();
    to[a.channels + at.first_channel + q] = sum.second();
  }
}

template <i32 type, int width> GPU_FN void group_norm_sums_last(const GroupNorm& a) {
  using Math = typename GroupNormMath<type>::Type;
  constexpr bool exact = type != type_f16 && type != type_bf16;
  GPU_DYNAMIC_SHARED(Math, memory);
  const GroupNormShared<Math, width> shared(memory);
  const bool silu = a.silu != 0;
  for (i64 item = block_x(); item < group_norm_items(a); item += grid_x()) {
    const StripItem<width> at(a, item, a.parts, a.part_size);
    const BackwardConstants<Math, width> constants(a, at);
    GradientSums<Math, width, exact> sums;
    for_each_row<type, width, rows_at_once_backward, true, Math>(
        a, at.rows(a), at.element(a),
        [&](Math(&x)[width], Math(&dy)[width], i64) { sums.add(constants, x, dy, silu); });
    using Sums = GroupNormSums<Math, exact>;
    Sums mine[width];
    sums.leave(mine, a, at);
    const StripMerge<Sums, width> merged(a, shared, mine);
    if (a.channel_partials) store_channel_sums(a, at, merged);
    for_each_group(at, merged, TimesWeight{a}, [&](u32 group, const Sums& sum) {
      Math* const to = group_slot<Math>(a, at, group);
      to[0] = sum.first();
      to[1] = sum.second();
    });
  }
}

template <i32 type, int width> GPU_FN void group_norm_gradient_last(const GroupNorm& a) {
  using Math = typename GroupNormMath<type>::Type;
  constexpr bool exact = type != type_f16 && type != type_bf16;
  GPU_DYNAMIC_SHARED(Math, memory);
  const GroupNormShared<Math, width> shared(memory);
  if (block_x() >= a.apply_blocks) {
    group_norm_finish<Math>(a, block_x() - a.apply_blocks);
    return;
  }
  const i64 items = group_norm_items(a);
  const bool silu = a.silu != 0;
  for (i64 item = block_x(); item < items; item += a.apply_blocks) {
    const StripItem<width> at(a, items - 1 - item, a.parts, a.part_size);
    const Math by_count = Math(1) / ((Math)a.spatial * (Math)at.group_channels);
    sync_threads();
    for (u32 group = at.first_group + thread_x() / warp_size; group <= at.last_group;
         group += block_size_x() / warp_size) {
      TwoSums<Math> sum{};
      for_each_slot<Math>(a, at, group,
                          [&](Math of_one, Math of_x, Math) { sum.merge(TwoSums<Math>::of(Math(0), of_one, of_x)); });
      sum = warp_merge(sum);
      if (lane_id() != 0) continue;
      shared.group_first[group - at.first_group] = sum.sums[0] * by_count;
      shared.group_second[group - at.first_group] = sum.sums[1] * by_count;
    }
    sync_threads();
    const BackwardConstants<Math, width> constants(a, at);
    const InputGradient<Math, width, exact> gradient(a, at, constants, shared.group_first, shared.group_second);
    for_each_row<type, width, rows_at_once_backward, true, Math>(
        a, at.rows(a), at.element(a), [&](Math(&x)[width], Math(&dy)[width], i64 element) {
          gradient.apply(x, dy, silu);
          store_values(a.output, known_type<type>(a.input_type), element, dy);
        });
  }
}
#endif
}  // namespace gpu
