// Group norm, channels first, in two launches. A group of an image is one stretch of memory.
#pragma once
#include "group_norm_finish.h"
#include "group_norm_strip.h"

namespace gpu {
#if !defined(GPU_HOST)
// One of `slots` parts of a group of an image, in vectors of the group's stretch.
template <int width> struct StretchItem {
  i64 image, slot, begin, end;
  i64 start;  // of the stretch, in elements of the tensor
  u32 group, group_channels;

  GPU_FN StretchItem(const GroupNorm& a, i64 item) {
    const i64 rest = quotient(item, a.slots);
    slot = item - rest * a.slots;
    image = quotient(rest, a.groups);
    group = (u32)(rest - image * a.groups);
    group_channels = (u32)a.channels / (u32)a.groups;
    start = (image * a.channels + (i64)group * group_channels) * a.spatial;
    const i64 vectors = quotient(group_channels * a.spatial, width), of_slot = quotient(vectors + a.slots - 1, a.slots);
    begin = slot * of_slot < vectors ? slot * of_slot : vectors;
    end = begin + of_slot < vectors ? begin + of_slot : vectors;
  }
};

template <i32 type, int width> GPU_FN void group_norm_statistics_first(const GroupNorm& a) {
  using Math = typename GroupNormMath<type>::Type;
  constexpr int together = 4;
  for (i64 item = block_x(); item < a.batch * a.groups * a.slots; item += grid_x()) {
    const StretchItem<width> at(a, item);
    Moments<Math> mine{};
    i64 vector = at.begin + thread_x();
    if (vector < at.end) {
      Math first[1];
      load_values(first, a.input, known_type<type>(a.input_type), at.start + vector * width);
      ShiftedSums<Math, 1> sums(first);
      u32 count = 0;
      const i64 step = block_size_x();
      while (vector < at.end) {
        Math x[together][width];
        GPU_UNROLL_FOR (int k = 0; k < together; ++k)
          if (vector + k * step < at.end)
            load_values(x[k], a.input, known_type<type>(a.input_type), at.start + (vector + k * step) * width);
        GPU_UNROLL_FOR (int k = 0; k < together; ++k) {
          if (vector + k * step >= at.end) continue;
          Math sum = Math(0), square = Math(0);
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
            const Math d = x[k][i] - sums.first[0];
            sum += d;
            square = fma(d, d, square);
          }
          sums.sum[0] += sum;
          sums.square[0] += square;
          count += width;
        }
        vector += together * step;
      }
      mine = sums.moments(0, (Math)count, group_pivot<type, Math>(a, at.image, at.group, at.group_channels));
    }
    mine = block_merge(mine);
    if (thread_x() != 0) continue;
    Math* const to =
        reinterpret_cast<Math*>(a.group_partials) + ((at.image * a.groups + at.group) * a.slots + at.slot) * 2;
    to[0] = mine.mean;
    to[1] = mine.m2;
  }
}

// A thread's vectors of a slot: each(values of the input, of the gradient, weight and bias of each, their element of
// the tensor). Two are on their way at once.
template <i32 type, int width, bool reads_grad, class Math, class Each>
GPU_FN void for_each_vector(const GroupNorm& a, const StretchItem<width>& at, const Each& each) {
  constexpr int together = 2;
  const bool whole = a.spatial % width == 0;  // a vector is of one channel
  const i64 first_channel = (i64)at.group * at.group_channels, end = at.end * width;
  const i64 step = (i64)block_size_x() * width, step_channels = quotient(step, a.spatial),
            step_place = step - step_channels * a.spatial;
  i64 inside = (at.begin + thread_x()) * width, channel = quotient(inside, a.spatial),
      place = inside - channel * a.spatial;
  channel += first_channel;
  for (; inside < end; inside += together * step) {
    Loaded<type, width> inputs[together], gradients[reads_grad ? together : 1];
    GPU_UNROLL_FOR (int k = 0; k < together; ++k) {
      if (inside + k * step >= end) continue;
      inputs[k].load(a.input, a.input_type, at.start + inside + k * step);
      if constexpr (reads_grad) gradients[k].load(a.grad_output, a.input_type, at.start + inside + k * step);
    }
    GPU_UNROLL_FOR (int k = 0; k < together; ++k) {
      if (inside + k * step >= end) continue;
      Math x[width], dy[width], weight[width], bias[width];
      inputs[k].get(x);
      if constexpr (reads_grad) gradients[k].get(dy);
      i64 c = channel, p = place;
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        if (i == 0 || (!whole && p == 0)) {
          weight[i] = affine(a.weight, a.weight_type, c, Math(1));
          bias[i] = affine(a.bias, a.weight_type, c, Math(0));
        } else {
          weight[i] = weight[i ? i - 1 : 0];
          bias[i] = bias[i ? i - 1 : 0];
        }
        if (!whole && ++p == a.spatial) p = 0, ++c;
      }
      each(x, dy, weight, bias, at.start + inside + k * step);
      place += step_place;
      channel += step_channels;
      if (place >= a.spatial) place -= a.spatial, ++channel;
    }
  }
}

template <i32 type, int width> GPU_FN void group_norm_apply_first(const GroupNorm& a) {
  using Math = typename GroupNormMath<type>::Type;
  constexpr bool exact = type != type_f16 && type != type_bf16;
  const i64 items = a.batch * a.groups * a.slots;
  const bool silu = a.silu != 0;
  for (i64 item = block_x(); item < items; item += grid_x()) {
    const StretchItem<width> at(a, items - 1 - item);
    const i64 group_of_image = at.image * a.groups + at.group;
    const Math* const from = reinterpret_cast<const Math*>(a.group_partials) + group_of_image * a.slots * 2;
    // Every warp merges for itself.
    Moments<Math> sum{};
    for (i64 slot = lane_id(); slot < a.slots; slot += warp_size) {
      const StretchItem<width> other(a, group_of_image * a.slots + slot);
      sum.merge({(Math)((other.end - other.begin) * width), from[2 * slot], from[2 * slot + 1]});
    }
    sum = warp_merge(sum);
    const GroupStatistics<Math> found(a, group_pivot<type, Math>(a, at.image, at.group, at.group_channels), sum.m2,
                                      sum.mean, at.group_channels);
    if (at.slot == 0 && thread_x() == 0) found.store(a, at.image, at.group);
    const Math origin = origin_of(found.mean, found.rstd), less = origin - found.mean;
    for_each_vector<type, width, false, Math>(
        a, at, [&](Math(&x)[width], const auto&, const Math(&weight)[width], const Math(&bias)[width], i64 element) {
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
            const Math scale = found.rstd * weight[i];
            x[i] = fma(x[i] - origin, scale, fma(less, scale, bias[i]));
          }
          activate<Math, exact>(x, silu);
          store_values(a.output, known_type<type>(a.input_type), element, x);
        });
  }
}

// ---- backward -----------------------------------------------------------------------------------------
// Of a part of a channel of an image: `team` threads of a warp share it.
template <i32 type, int width> GPU_FN void group_norm_sums_first(const GroupNorm& a) {
  using Math = typename GroupNormMath<type>::Type;
  constexpr bool exact = type != type_f16 && type != type_bf16;
  constexpr int together = 2;
  const bool silu = a.silu != 0;
  const u32 teams = warp_size / a.team, warps = block_size_x() / warp_size, lane = lane_id() & (a.team - 1);
  const i64 items = a.batch * a.channels * a.parts, group_channels = quotient(a.channels, a.groups),
            vectors = quotient(a.spatial, width);
  for (i64 turn = ((i64)block_x() * warps + thread_x() / warp_size) * teams; turn < items;
       turn += (i64)grid_x() * warps * teams) {
    const i64 item = turn + lane_id() / a.team;
    Math of_one = Math(0), of_x = Math(0);
    const i64 plane = quotient(item, a.parts), part = item - plane * a.parts, image = quotient(plane, a.channels),
              channel = plane - image * a.channels;
    if (item < items) {
      const i64 row = image * a.groups + quotient(channel, group_channels);
      const Math mean = reinterpret_cast<const Math*>(a.mean)[row], rstd = reinterpret_cast<const Math*>(a.rstd)[row];
      const Math scale = rstd * affine(a.weight, a.weight_type, channel, Math(1)),
                 bias = affine(a.bias, a.weight_type, channel, Math(0));
      const i64 end = (part + 1) * a.part_size < vectors ? (part + 1) * a.part_size : vectors;
      for (i64 vector = part * a.part_size + lane; vector < end; vector += together * a.team) {
        Math x[together][width], dy[together][width];
        GPU_UNROLL_FOR (int k = 0; k < together; ++k) {
          if (vector + k * a.team >= end) continue;
          const i64 element = plane * a.spatial + (vector + k * a.team) * width;
          load_values(x[k], a.input, known_type<type>(a.input_type), element);
          load_values(dy[k], a.grad_output, known_type<type>(a.input_type), element);
        }
        GPU_UNROLL_FOR (int k = 0; k < together; ++k) {
          if (vector + k * a.team >= end) continue;
          Math one = Math(0), along = Math(0), z[width];
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
            x[k][i] -= mean;
            z[i] = fma(x[k][i], scale, bias);
          }
          gradient_of_z<Math, exact>(dy[k], z, silu);
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
            one += dy[k][i];
            along = fma(dy[k][i], x[k][i], along);
          }
          of_one += one;
          of_x += along;
        }
      }
      of_x *= rstd;
    }
    for (u32 mask = a.team / 2; mask; mask /= 2) {
      of_one += shuffle_xor_value(of_one, (int)mask);
      of_x += shuffle_xor_value(of_x, (int)mask);
    }
    if (item >= items || lane != 0) continue;
    Math* const to = reinterpret_cast<Math*>(a.channel_partials) + (image * a.parts + part) * 2 * a.channels + channel;
    to[0] = of_one;
    to[a.channels] = of_x;
  }
}

template <i32 type, int width> GPU_FN void group_norm_gradient_first(const GroupNorm& a) {
  using Math = typename GroupNormMath<type>::Type;
  constexpr bool exact = type != type_f16 && type != type_bf16;
  if (block_x() >= a.apply_blocks) {
    group_norm_finish<Math>(a, block_x() - a.apply_blocks);
    return;
  }
  const i64 items = a.batch * a.groups * a.slots;
  const bool silu = a.silu != 0;
  for (i64 item = block_x(); item < items; item += a.apply_blocks) {
    const StretchItem<width> at(a, items - 1 - item);
    const i64 first_channel = (i64)at.group * at.group_channels, row = at.image * a.groups + at.group;
    const Math mean = reinterpret_cast<const Math*>(a.mean)[row], rstd = reinterpret_cast<const Math*>(a.rstd)[row];
    Math of_one = Math(0), of_x = Math(0);
    for (i64 j = thread_x(); j < (i64)at.group_channels * a.parts; j += block_size_x()) {
      const i64 part = quotient(j, at.group_channels), channel = first_channel + j - part * at.group_channels;
      const Math* const from =
          reinterpret_cast<const Math*>(a.channel_partials) + (at.image * a.parts + part) * 2 * a.channels + channel;
      const Math weight = affine(a.weight, a.weight_type, channel, Math(1));
      of_one = fma(from[0], weight, of_one);
      of_x = fma(from[a.channels], weight, of_x);
    }
    const Math by_count = Math(1) / ((Math)a.spatial * (Math)at.group_channels);
    of_one = block_reduce<Sum>(of_one) * by_count;
    of_x = block_reduce<Sum>(of_x) * by_count;
    for_each_vector<type, width, true, Math>(
        a, at,
        [&](Math(&x)[width], Math(&dy)[width], const Math(&weight)[width], const Math(&bias)[width], i64 element) {
          Math z[width];
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
            x[i] = (x[i] - mean) * rstd;
            z[i] = fma(x[i], weight[i], bias[i]);
          }
          gradient_of_z<Math, exact>(dy, z, silu);
          GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = fma(dy[i], weight[i], -fma(x[i], of_x, of_one)) * rstd;
          store_values(a.output, known_type<type>(a.input_type), element, x);
        });
  }
}
#endif
}  // namespace gpu
