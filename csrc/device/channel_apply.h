// Elementwise passes of batch norm: each element and its channel's numbers give one element.
//
// In memory's order (channels first; channels last whose vectors do not fit) a thread looks its channel's numbers up
// for each vector, or each element where a vector holds several channels. Channels last, a thread stays with adjacent
// channels, whose numbers it keeps, and goes down the rows.
#pragma once
#include "batchnorm_arguments.h"
#include "channel_reduce.h"
#include "vectors.h"

namespace gpu {
template <class Math> GPU_FN Math affine(const u8* p, i32 type, i64 channel, Math otherwise) {
  if (!p) return otherwise;
  Math value[1];
  load_values(value, p, type, channel);
  return value[0];
}
template <class Math> GPU_FN Math statistic(const u8* p, i64 channel, Math otherwise = Math(0)) {
  return p ? reinterpret_cast<const Math*>(p)[channel] : otherwise;
}

// Each has: whether it reads grad_output and z, and makes or reads a mask; Common (once a thread), load (a channel's
// numbers), apply.
template <class Math_> struct NormalizeChannel {
  using Math = Math_;
  static constexpr bool reads_grad = false, reads_z = true, makes_mask = false, reads_mask = false;
  struct Common {
    bool relu;
    GPU_FN explicit Common(const ChannelApply& a) : relu(a.relu != 0) {}
  };
  Math mean, scale, shift;

  GPU_FN void load(const ChannelApply& a, const Common&, i64 channel) {
    mean = statistic<Math>(a.mean, channel);
    scale = statistic<Math>(a.inv_std, channel) * affine(a.weight, a.weight_type, channel, Math(1));
    shift = affine(a.shift, a.weight_type, channel, Math(0));
  }
  // The difference comes first: with a large mean the product would lose what it is about.
  GPU_FN Math normalized(Math x, Math z) const { return fma(x - mean, scale, shift) + z; }
  GPU_FN Math apply(const Common& common, Math x, Math, Math z) const {
    const Math y = normalized(x, z);
    return common.relu && y <= Math(0) ? Math(0) : y;
  }
};

// The gradient where the output of the forward's ReLU is positive.
template <class Math_> struct ReluGradientChannel : NormalizeChannel<Math_> {
  using Math = Math_;
  using Common = typename NormalizeChannel<Math_>::Common;
  static constexpr bool reads_grad = true;
  GPU_FN Math apply(const Common&, Math x, Math dy, Math z) const { return this->normalized(x, z) <= Math(0) ? Math(0) : dy; }
};

template <class Math_> struct GradientChannel {
  using Math = Math_;
  static constexpr bool reads_grad = true, reads_z = false, makes_mask = false, reads_mask = false;
  struct Common {
    Math by_count;
    GPU_FN explicit Common(const ChannelApply& a) {
      Math count = Math(0);
      for (i32 k = 0; k < a.counts; ++k)
        count += a.count_is_int ? (Math) reinterpret_cast<const i32*>(a.count)[k] : reinterpret_cast<const Math*>(a.count)[k];
      by_count = Math(1) / maximum(count, Math(1));
    }
  };
  Math mean, scale, mean_dy, along;

  GPU_FN void load(const ChannelApply& a, const Common& common, i64 channel) {
    const Math inv_std = statistic<Math>(a.inv_std, channel);
    mean = statistic<Math>(a.mean, channel);
    scale = inv_std * affine(a.weight, a.weight_type, channel, Math(1));
    mean_dy = statistic<Math>(a.sum_dy, channel) * common.by_count;
    along = statistic<Math>(a.sum_dy_xmu, channel) * common.by_count * (inv_std * inv_std);
  }
  GPU_FN Math apply(const Common&, Math x, Math dy, Math) const { return fma(mean - x, along, dy - mean_dy) * scale; }
};

// ---- with a mask of the ReLU: groupbn ------------------------------------------------------------------
// A thread works on whole bytes of the mask.
constexpr int elements_of_mask = 8;

// What the forward's ReLU lets through, and which bit the mask has for it; nan passes, as in torch.
template <class Math> GPU_FN bool passes(Math y) { return !(y <= Math(0)); }

template <class Math_> struct MaskedNormalizeChannel : NormalizeChannel<Math_> {
  static constexpr bool makes_mask = true;
};
template <class Math_> struct MaskedGradientChannel : GradientChannel<Math_> {
  static constexpr bool reads_mask = true;
};
template <class Op> constexpr bool has_mask = Op::makes_mask || Op::reads_mask;

#if !defined(GPU_HOST)
// `width` elements of each tensor: one access of 16 bytes, or several of them, or less.
template <class T, int width> struct ApplyVectors {
  static constexpr int of_one = width < vector_width<T> ? width : vector_width<T>, accesses = width / of_one;
  using One = Vector<T, of_one>;
  One x[accesses], dy[accesses], z[accesses];
  u32 bits;

  GPU_FN static T& at(One (&vectors)[accesses], int i) { return vectors[i / of_one].v[i % of_one]; }
  GPU_FN static void load_vectors(One (&to)[accesses], const u8* tensor, i64 index) {
    GPU_UNROLL for (int k = 0; k < accesses; ++k) to[k] = *reinterpret_cast<const One*>(reinterpret_cast<const T*>(tensor) + index + k * of_one);
  }
  GPU_FN static void load_some(One (&to)[accesses], const u8* tensor, i64 index, int count) {
    GPU_UNROLL for (int i = 0; i < width; ++i)
      if (i < count) at(to, i) = reinterpret_cast<const T*>(tensor)[index + i];
  }
  GPU_FN static void store_vectors(u8* tensor, i64 index, const One (&from)[accesses]) {
    GPU_UNROLL for (int k = 0; k < accesses; ++k) *reinterpret_cast<One*>(reinterpret_cast<T*>(tensor) + index + k * of_one) = from[k];
  }
  GPU_FN static void store_some(u8* tensor, i64 index, One (&from)[accesses], int count) {
    GPU_UNROLL for (int i = 0; i < width; ++i)
      if (i < count) reinterpret_cast<T*>(tensor)[index + i] = at(from, i);
  }

  template <class Op> GPU_FN void load_mask(const ChannelApply& a, i64 index) {
    bits = 0;
    if constexpr (Op::reads_mask) bits = a.bitmask ? a.bitmask[index / elements_of_mask] : 0xffu;
  }
  template <class Op> GPU_FN void load(const ChannelApply& a, i64 index) {
    load_vectors(x, a.input, index);
    if constexpr (Op::reads_grad) load_vectors(dy, a.grad_output, index);
    if constexpr (Op::reads_z)
      if (a.z) load_vectors(z, a.z, index);
    load_mask<Op>(a, index);
  }
  template <class Op> GPU_FN void load_each(const ChannelApply& a, i64 index, int count) {
    load_some(x, a.input, index, count);
    if constexpr (Op::reads_grad) load_some(dy, a.grad_output, index, count);
    if constexpr (Op::reads_z)
      if (a.z) load_some(z, a.z, index, count);
    load_mask<Op>(a, index);
  }
  // In place: x becomes the result, and dy what the mask leaves of it.
  template <class Op> GPU_FN void apply(const ChannelApply& a, const Op& op, const typename Op::Common& common, int i) {
    using Math = typename Op::Math;
    Math g = Math(0), more = Math(0);
    if constexpr (Op::reads_mask)
      if (!(bits >> i & 1)) at(dy, i) = T{};
    if constexpr (Op::reads_grad) g = load_as<Math>(at(dy, i));
    if constexpr (Op::reads_z)
      if (a.z) more = load_as<Math>(at(z, i));
    const Math y = op.apply(common, load_as<Math>(at(x, i)), g, more);
    if constexpr (Op::makes_mask) bits |= (u32)passes(y) << i;
    store_as(at(x, i), y);
  }
  template <class Op> GPU_FN void store(const ChannelApply& a, i64 index) const {
    store_vectors(a.output, index, x);
    store_others<Op>(a, index, [&] { store_vectors(a.grad_z, index, dy); });
  }
  template <class Op> GPU_FN void store_each(const ChannelApply& a, i64 index, int count) {
    store_some(a.output, index, x, count);
    store_others<Op>(a, index, [&] { store_some(a.grad_z, index, dy, count); });
  }
  template <class Op, class StoreGradient> GPU_FN void store_others(const ChannelApply& a, i64 index, const StoreGradient& store_gradient) const {
    if constexpr (Op::makes_mask)
      if (a.bitmask) a.bitmask[index / elements_of_mask] = (u8)bits;
    if constexpr (Op::reads_mask)
      if (a.grad_z) store_gradient();
  }
};
// How many elements a thread takes at once.
template <class T, class Op> constexpr int apply_width = has_mask<Op> ? elements_of_mask : vector_width<T>;

GPU_FN i64 quotient(i64 a, i64 b) { return ((u64)a | (u64)b) >> 32 ? a / b : (i64)((u32)a / (u32)b); }

template <class T, template <class> class Channel> GPU_FN void apply_in_order(const ChannelApply& a) {
  using Op = Channel<typename MathOf<T>::type>;
  constexpr int width = apply_width<T, Op>;
  const i64 total = a.batch * a.channels * a.spatial, step = (i64)grid_x() * block_size_x() * width;
  i64 index = ((i64)block_x() * block_size_x() + thread_x()) * width;
  if (index >= total) return;
  const typename Op::Common common(a);
  const bool whole = a.spatial % width == 0;  // a vector is of one channel
  i64 segment = quotient(index, a.spatial), place = index - segment * a.spatial;
  u32 channel = (u32)(segment - quotient(segment, a.channels) * a.channels);
  for (; index < total; index += step) {
    const bool fits = a.vectors && total - index >= width;
    const int count = total - index < width ? (int)(total - index) : width;
    ApplyVectors<T, width> x;
    if (fits) x.template load<Op>(a, index);
    else x.template load_each<Op>(a, index, count);
    Op op;
    op.load(a, common, channel);
    if (whole) {
      GPU_UNROLL for (int i = 0; i < width; ++i) x.apply(a, op, common, i);
    } else {
      i64 at = place;
      u32 c = channel;
      GPU_UNROLL for (int i = 0; i < width; ++i) {
        if (i >= count) continue;
        x.apply(a, op, common, i);
        if (++at < a.spatial || i + 1 >= count) continue;
        at = 0;
        c = c + 1 == (u32)a.channels ? 0 : c + 1;
        op.load(a, common, c);
      }
    }
    if (fits) x.template store<Op>(a, index);
    else x.template store_each<Op>(a, index, count);
    place += a.step_spatial;
    channel += a.step_channels;
    if (place >= a.spatial) {
      place -= a.spatial;
      ++channel;
    }
    if (channel >= (u32)a.channels) channel -= (u32)a.channels;
  }
}

// Blocks: runs of part_rows rows * column_blocks, those of one run side by side.
template <class T, template <class> class Channel> GPU_FN void apply_channels_last(const ChannelApply& a) {
  using Op = Channel<typename MathOf<T>::type>;
  constexpr int width = apply_width<T, Op>;
  const i64 channel = ((i64)(block_x() % a.column_blocks) * a.columns + (thread_x() & (a.columns - 1))) * width;
  if (channel >= a.channels) return;
  const u32 lanes = block_size_x() / a.columns;
  const i64 begin = (i64)(block_x() / a.column_blocks) * a.part_rows;
  const i64 end = begin + a.part_rows < a.batch ? begin + a.part_rows : a.batch;
  i64 row = begin + thread_x() / a.columns;
  if (row >= end) return;
  const typename Op::Common common(a);
  Op op[width];
  GPU_UNROLL for (int i = 0; i < width; ++i) op[i].load(a, common, channel + i);
  i64 index = row * a.channels + channel;
  const i64 step = (i64)lanes * a.channels;
  constexpr int together = width > vector_width<T> ? 1 : 2;
  for (; row + (together - 1) * lanes < end; row += together * lanes, index += together * step) {
    ApplyVectors<T, width> x[together];
    GPU_UNROLL for (int k = 0; k < together; ++k) x[k].template load<Op>(a, index + k * step);
    GPU_UNROLL for (int k = 0; k < together; ++k) {
      GPU_UNROLL for (int i = 0; i < width; ++i) x[k].apply(a, op[i], common, i);
      x[k].template store<Op>(a, index + k * step);
    }
  }
  if (together > 1 && row < end) {
    ApplyVectors<T, width> x;
    x.template load<Op>(a, index);
    GPU_UNROLL for (int i = 0; i < width; ++i) x.apply(a, op[i], common, i);
    x.template store<Op>(a, index);
  }
}
#endif
}  // namespace gpu

#define CHANNEL_APPLY_KERNEL(name, ...)                                                                \
  extern "C" GPU_KERNEL(gpu::apply_threads, 2) void name(gpu::ChannelApply arguments) { __VA_ARGS__(arguments); } \
  GPU_REGISTER(name)
#define CHANNEL_APPLY_KERNELS(op, Channel, name, T)                                                    \
  CHANNEL_APPLY_KERNEL(op##_any_##name, gpu::apply_in_order<T, gpu::Channel>)                          \
  CHANNEL_APPLY_KERNEL(op##_last_##name, gpu::apply_channels_last<T, gpu::Channel>)
