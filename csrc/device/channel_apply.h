// Elementwise passes of batch norm: each element and its channel's numbers give one element.
//
// A block has the numbers of all channels that it meets in shared memory. In memory's order (channels first; channels
// last whose vectors do not fit) a thread looks them up for each vector, or each element where a vector holds several
// channels. Channels last, a thread stays with adjacent channels, whose numbers it keeps, and goes down the rows.
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
  Math origin, scale, shift;

  GPU_FN void load(const ChannelApply& a, const Common&, i64 channel) {
    const Math mean = statistic<Math>(a.mean, channel), inv_std = statistic<Math>(a.inv_std, channel, Math(1));
    origin = origin_of(mean, inv_std);
    scale = inv_std * affine(a.weight, a.weight_type, channel, Math(1));
    shift = fma(origin - mean, scale, affine(a.shift, a.weight_type, channel, Math(0)));
  }
  GPU_FN Math normalized(Math x, Math z) const { return fma(x - origin, scale, shift) + z; }
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
  GPU_FN Math apply(const Common&, Math x, Math dy, Math z) const {
    return this->normalized(x, z) <= Math(0) ? Math(0) : dy;
  }
};

template <class Math_> struct GradientChannel {
  using Math = Math_;
  static constexpr bool reads_grad = true, reads_z = false, makes_mask = false, reads_mask = false;
  struct Common {
    Math by_count;
    GPU_FN explicit Common(const ChannelApply& a) {
      Math count = Math(0);
      for (i32 k = 0; k < a.counts; ++k)
        count += a.count_is_int ? (Math) reinterpret_cast<const i32*>(a.count)[k]
                                : reinterpret_cast<const Math*>(a.count)[k];
      by_count = Math(1) / maximum(count, Math(1));
    }
  };
  Math mean, scale, along, shift;

  GPU_FN void load(const ChannelApply& a, const Common& common, i64 channel) {
    const Math inv_std = statistic<Math>(a.inv_std, channel);
    mean = statistic<Math>(a.mean, channel);
    scale = inv_std * affine(a.weight, a.weight_type, channel, Math(1));
    along = statistic<Math>(a.sum_dy_xmu, channel) * common.by_count * (inv_std * inv_std) * scale;
    shift = statistic<Math>(a.sum_dy, channel) * common.by_count * -scale;
  }
  // What comes to dy * scale is small beside it, as a rule, and so are its roundings.
  GPU_FN Math apply(const Common&, Math x, Math dy, Math) const { return fma(dy, scale, fma(mean - x, along, shift)); }
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
// How many elements a thread takes at once.
template <class T, class Op> constexpr int apply_width = has_mask<Op> ? elements_of_mask : vector_width<T>;
// How often before the first of them are needed.
template <class T, class Op, bool with_z>
constexpr int apply_together = (Op::reads_grad || with_z ? 2 : 4) * vector_width<T> <= apply_width<T, Op>
                                   ? 1
                                   : (Op::reads_grad || with_z ? 2 : 4) * vector_width<T> / apply_width<T, Op>;

template <class T> constexpr int apply_blocks = channel_blocks<T> + 1;  // at once, of a multiprocessor

// So many of each tensor that the operation reads: one access of 16 bytes, or several of them. with_z: z may be null.
template <class T, class Op, bool with_z> struct ApplyVectors {
  using Math = typename Op::Math;
  static constexpr int width = apply_width<T, Op>, of_one = vector_width<T>, accesses = width / of_one;
  using One = Packed<T, of_one>;
  One x[accesses], dy[accesses], z[accesses];
  u32 bits;

  // The first `count` elements; all, at a multiple of 16 bytes, if `fits`.
  GPU_FN static void load_tensor(One (&to)[accesses], const u8* tensor, i64 index, bool fits, u32 count) {
    const T* from = reinterpret_cast<const T*>(tensor) + index;
    GPU_UNROLL_FOR (int k = 0; k < accesses; ++k) {
      if (fits) {
        to[k] = load_packed<of_one>(from + k * of_one);
        continue;
      }
      Vector<T, of_one> some{};
      GPU_UNROLL_FOR (u32 i = 0; i < of_one; ++i)
        if (k * of_one + i < count) some.v[i] = from[k * of_one + i];
      to[k] = bit_cast<One>(some);
    }
  }
  GPU_FN static void store_tensor(u8* tensor, i64 index, const Math (&from)[width], bool fits, u32 count) {
    T* to = reinterpret_cast<T*>(tensor) + index;
    GPU_UNROLL_FOR (int k = 0; k < accesses; ++k) {
      Math some[of_one];
      GPU_UNROLL_FOR (int i = 0; i < of_one; ++i) some[i] = from[k * of_one + i];
      const One packed = pack_values<T>(some);
      if (fits) {
        *reinterpret_cast<One*>(to + k * of_one) = packed;
        continue;
      }
      const auto each = bit_cast<Vector<T, of_one>>(packed);
      GPU_UNROLL_FOR (u32 i = 0; i < of_one; ++i)
        if (k * of_one + i < count) to[k * of_one + i] = each.v[i];
    }
  }
  GPU_FN static void unpack(Math (&x)[width], const One (&from)[accesses]) {
    GPU_UNROLL_FOR (int k = 0; k < accesses; ++k) {
      Math some[of_one];
      unpack_values<T>(some, from[k]);
      GPU_UNROLL_FOR (int i = 0; i < of_one; ++i) x[k * of_one + i] = some[i];
    }
  }

  GPU_FN void load(const ChannelApply& a, i64 index, bool fits = true, u32 count = width) {
    load_tensor(x, a.input, index, fits, count);
    if constexpr (Op::reads_grad) load_tensor(dy, a.grad_output, index, fits, count);
    if constexpr (with_z) {
      if (a.z) load_tensor(z, a.z, index, fits, count);
      else
        GPU_UNROLL_FOR (int k = 0; k < accesses; ++k) z[k] = One{};
    }
    if constexpr (Op::reads_mask) bits = a.bitmask ? a.bitmask[index / elements_of_mask] : 0xffu;
  }
  // of(i): the numbers of element i's channel.
  template <class Of> GPU_FN void apply(const ChannelApply& a, const typename Op::Common& common, const Of& of,
                                        i64 index, bool fits = true, u32 count = width) const {
    Math value[width], grad[width] = {}, more[width] = {};
    unpack(value, x);
    if constexpr (Op::reads_grad) unpack(grad, dy);
    if constexpr (with_z) unpack(more, z);
    u32 passed = 0;
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      if constexpr (Op::reads_mask) grad[i] = bits >> i & 1 ? grad[i] : Math(0);
      value[i] = of(i).apply(common, value[i], grad[i], more[i]);
      if constexpr (Op::makes_mask) passed |= (u32)(passes(value[i]) && (u32)i < count) << i;
    }
    store_tensor(a.output, index, value, fits, count);
    if constexpr (Op::makes_mask)
      if (a.bitmask) a.bitmask[index / elements_of_mask] = (u8)passed;
    if constexpr (Op::reads_mask)
      if (a.grad_z) store_tensor(a.grad_z, index, grad, fits, count);
  }
};

// Channels' numbers in shared memory, each an array of its own: entry j of `count` is channel (first + j) % channels.
template <class Op> struct ChannelTable {
  using Math = typename Op::Math;
  static constexpr int numbers = (int)(sizeof(Op) / sizeof(Math));
  struct Numbers { Math v[numbers]; };
  Math* entries;

  GPU_FN void fill(const ChannelApply& a, const typename Op::Common& common, i64 first, u32 count) const {
    for (u32 j = thread_x(); j < count; j += block_size_x()) {
      const i64 channel = first + j < a.channels ? first + j : first + j - a.channels;
      if (channel >= a.channels) continue;
      Op op;
      op.load(a, common, channel);
      const auto found = bit_cast<Numbers>(op);
      GPU_UNROLL_FOR (int k = 0; k < numbers; ++k) entries[k * table_channels + j] = found.v[k];
    }
    sync_threads();
  }
  GPU_FN Op operator[](u32 j) const {
    Numbers found;
    GPU_UNROLL_FOR (int k = 0; k < numbers; ++k) found.v[k] = entries[k * table_channels + j];
    return bit_cast<Op>(found);
  }
};
template <class Math> struct alignas(16) TableWord { Math v[16 / sizeof(Math)]; };

GPU_FN i64 quotient(i64 a, i64 b) { return ((u64)a | (u64)b) >> 32 ? a / b : (i64)((u32)a / (u32)b); }

// Blocks: runs of part_vectors vectors. whole: each vector is of one channel, and fits.
template <class T, class Op, bool with_z, bool whole> GPU_FN void apply_in_order(const ChannelApply& a,
                                                                                 const ChannelTable<Op>& table) {
  constexpr int width = apply_width<T, Op>,
                together = whole ? apply_together<T, Op, with_z> : apply_together<T, Op, true>;
  const i64 total = a.batch * a.channels * a.spatial, begin = (i64)block_x() * a.part_vectors * width;
  const i64 run = total - begin < (i64)a.part_vectors * width ? total - begin : (i64)a.part_vectors * width;
  const u32 step = block_size_x() * width, vectors = (u32)((run + width - 1) / width);
  const u32 count = thread_x() < vectors ? (vectors - thread_x() - 1) / block_size_x() + 1 : 0;
  const i64 first_segment = quotient(begin, a.spatial), from = begin - first_segment * a.spatial;
  const i64 touched = quotient(from + run - 1, a.spatial) + 1;
  const u32 entries = (u32)(touched < a.channels ? touched : a.channels);  // of the table
  i64 next = begin + thread_x() * width, index = next, place = from + thread_x() * width;
  u32 entry = (u32)quotient(place, a.spatial);
  place -= entry * a.spatial;
  if (entry >= entries) entry %= entries;
  const auto after = [&](u32 e) { return e + 1 == entries ? 0 : e + 1; };
  const typename Op::Common common(a);

  ApplyVectors<T, Op, with_z> x[together];
  const auto fits = [&](i64 i) { return whole || (a.vectors && total - i >= width); };
  const auto there = [&](i64 i) { return total - i < width ? (u32)(total - i) : (u32)width; };
  const auto load = [&](u32 k) {
    x[k].load(a, next, fits(next), there(next));
    next += step;
  };
  const auto start = [&] {
    table.fill(a, common, first_segment - quotient(first_segment, a.channels) * a.channels, entries);
  };
  const auto add = [&](u32 k) {
    if (whole || a.spatial >= width) {  // two channels at most
      const i64 of_first = whole ? width : a.spatial - place;
      const Op op = table[entry], second = whole ? op : table[after(entry)];
      x[k].apply(a, common, [&](int i) { return i < of_first ? op : second; }, index, fits(index), there(index));
    } else {
      u32 e = entry;
      i64 end = a.spatial - place;
      const auto of = [&](int i) {
        if (i >= end) {
          e = after(e);
          end += a.spatial;
        }
        return table[e];
      };
      x[k].apply(a, common, of, index, fits(index), there(index));
    }
    index += step;
    place += a.step_spatial;
    entry += a.step_channels;
    if (place >= a.spatial) {
      place -= a.spatial;
      ++entry;
    }
    if (entry >= entries) entry -= entries;
  };
  stream_vectors<together>(count, load, start, add);
}

// Blocks: runs of part_rows rows * column_blocks, those of one run side by side.
template <class T, class Op, bool with_z> GPU_FN void apply_channels_last(const ChannelApply& a,
                                                                          const ChannelTable<Op>& table) {
  constexpr int width = apply_width<T, Op>, together = apply_together<T, Op, with_z>;
  const u32 run = block_x() / a.column_blocks, column_block = block_x() - run * a.column_blocks;
  const u32 column = thread_x() & (a.columns - 1), lane = thread_x() / a.columns, lanes = block_size_x() / a.columns;
  const u32 first = column_block * a.columns * width, channel = first + column * width;
  const i64 begin = run * a.part_rows;
  const u32 rows = (u32)(a.batch - begin < a.part_rows ? a.batch - begin : a.part_rows);
  const u32 count = channel < a.channels && lane < rows ? (rows - lane - 1) / lanes + 1 : 0;
  const typename Op::Common common(a);
  i64 next = (begin + lane) * a.channels + channel, index = next;
  const i64 step = (i64)lanes * a.channels;
  ApplyVectors<T, Op, with_z> x[together];
  Op op[width];
  const auto load = [&](u32 k) {
    x[k].load(a, next);
    next += step;
  };
  const auto start = [&] {
    table.fill(a, common, first, a.columns * width);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) op[i] = table[column * width + i];
  };
  const auto add = [&](u32 k) {
    x[k].apply(a, common, [&](int i) -> const Op& { return op[i]; }, index);
    index += step;
  };
  stream_vectors<together>(count, load, start, add);
}

template <class T, class Op, bool last> GPU_FN void apply_to_channels(const ChannelApply& a) {
  using Math = typename Op::Math;
  GPU_SHARED(TableWord<Math>, words, ChannelTable<Op>::numbers * table_channels * sizeof(Math) / 16);
  const ChannelTable<Op> table{words[0].v};
  const bool whole = last || (a.vectors && a.spatial % apply_width<T, Op> == 0);
  if (!whole) {
    if constexpr (!last) apply_in_order<T, Op, Op::reads_z, false>(a, table);
  } else if (Op::reads_z && a.z) {
    if constexpr (last) apply_channels_last<T, Op, Op::reads_z>(a, table);
    else apply_in_order<T, Op, Op::reads_z, true>(a, table);
  } else {
    if constexpr (last) apply_channels_last<T, Op, false>(a, table);
    else apply_in_order<T, Op, false, true>(a, table);
  }
}
#endif
}  // namespace gpu

#define CHANNEL_APPLY_KERNEL(name, blocks, ...)                                              \
  extern "C" GPU_KERNEL(gpu::apply_threads, blocks) void name(gpu::ChannelApply arguments) { \
    gpu::await_previous_kernel();                                                            \
    __VA_ARGS__(arguments);                                                                  \
  }                                                                                          \
  GPU_REGISTER(name)
#define CHANNEL_APPLY_KERNELS(op, Channel, name, T)                                          \
  CHANNEL_APPLY_KERNEL(op##_any_##name, gpu::apply_blocks<T>,                                \
                       gpu::apply_to_channels<T, gpu::Channel<gpu::MathOf<T>::type>, false>) \
  CHANNEL_APPLY_KERNEL(op##_last_##name, gpu::apply_blocks<T>,                               \
                       gpu::apply_to_channels<T, gpu::Channel<gpu::MathOf<T>::type>, true>)
