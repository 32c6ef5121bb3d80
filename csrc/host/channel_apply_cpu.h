// The CPU variant of batch norm's elementwise passes: the kernels' own formulas over tiles. `first` are the statistics
// of one channel of one image, and of adjacent channels in some rows.
#pragma once
#include "device/channel_apply.h"
#include "host/channel.h"
#include "host/channel_tiles.h"

namespace apex {
template <class Op> struct ApplyTile {
  using Math = typename Op::Math;
  const bool streamed;
  alignas(64) Math first[piece], second[piece], third[piece], made[piece];

  explicit ApplyTile(const gpu::ChannelApply& a)
      : streamed(is_streamed(a.batch * a.channels * (a.channels_last ? 1 : a.spatial), a.input_type)) {}

  // Elements [i, i + rows * n), at most `piece`; `of` gives the numbers of an element's channel, by its place in a row.
  template <class Of>
  APEX_INLINE void run(const gpu::ChannelApply& a, const TileConversions<Math>& convert,
                       const typename Op::Common& common, int64_t i, int64_t rows, int64_t n, const Of& of) {
    const int64_t all = rows * n;
    const Math* x = load_tile(convert, a.input, a.input_type, i, all, first);
    const Math* dy = x;
    if constexpr (Op::reads_grad) dy = load_tile(convert, a.grad_output, a.input_type, i, all, second);
    if constexpr (Op::reads_mask) {
      dy = mask_tile(a.bitmask, i, all, dy, second);
      if (a.grad_z) store_tile(convert, a.grad_z, a.input_type, i, all, dy);
    }
    Math* const result = made_tile(a.output, a.input_type, i, made, streamed);
    const bool adds = Op::reads_z && a.z;
    const Math* z = adds ? load_tile(convert, a.z, a.input_type, i, all, third) : nullptr;
    for (int64_t k = 0; k < all; k += n) {
      if (adds) {
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) result[k + j] = of(j).apply(common, x[k + j], dy[k + j], z[k + j]);
      } else {
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) result[k + j] = of(j).apply(common, x[k + j], dy[k + j], Math(0));
      }
    }
    store_tile(convert, a.output, a.input_type, i, all, static_cast<const Math*>(result), streamed);
    if constexpr (Op::makes_mask) {
      if (!a.bitmask) return;
      uint8_t flags[piece];
      for (int64_t j = 0; j < all; ++j) flags[j] = gpu::passes(result[j]);
      store_bits(a.bitmask, i, all, flags);
    }
  }
};

// The numbers of a tile of channels, each an array of its own, so that loops over channels vectorise.
template <class Op> struct ChannelNumbers {
  using Math = typename Op::Math;
  static constexpr int count = int(sizeof(Op) / sizeof(Math));
  struct Numbers { Math v[count]; };
  alignas(64) Math of[count][tile];

  APEX_INLINE void set(int64_t j, const Op& op) {
    const auto numbers = gpu::bit_cast<Numbers>(op);
    for (int k = 0; k < count; ++k) of[k][j] = numbers.v[k];
  }
  APEX_INLINE Op operator[](int64_t j) const {
    Numbers numbers;
    for (int k = 0; k < count; ++k) numbers.v[k] = of[k][j];
    return gpu::bit_cast<Op>(numbers);
  }
};

// Channels [begin, end) of all images, one after the other.
template <class Op> struct ApplyChannelsFirst {
  const gpu::ChannelApply& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, typename Op::Math());
    const typename Op::Common common(a);
    ApplyTile<Op> tiles(a);
    for (int64_t segment = begin; segment < end; ++segment) {
      Op op;
      op.load(a, common, segment % a.channels);
      for (int64_t i = 0; i < a.spatial; i += piece)
        tiles.run(a, convert, common, segment * a.spatial + i, 1, std::min<int64_t>(piece, a.spatial - i),
                  [&](int64_t) APEX_INLINE_LAMBDA -> const Op& { return op; });
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// Runs [begin, end) of rows. No two runs have a byte of a mask in common.
template <class Op> struct ApplyChannelsLast {
  static constexpr int64_t rows_of_run = gpu::has_mask<Op> ? gpu::elements_of_mask : 1;
  const gpu::ChannelApply& a;

  APEX_INLINE void run_chunks(int level, int64_t first_run, int64_t last_run) const {
    const int64_t begin = first_run * rows_of_run, end = std::min<int64_t>(last_run * rows_of_run, a.batch);
    if constexpr (Op::makes_mask)
      if (a.bitmask) std::fill(a.bitmask + begin * a.channels / 8, a.bitmask + (end * a.channels + 7) / 8, gpu::u8(0));
    const auto& convert = tile_conversions(level, typename Op::Math());
    const typename Op::Common common(a);
    ApplyTile<Op> tiles(a);
    ChannelNumbers<Op> ops;
    for (int64_t c = 0; c < a.channels; c += tile) {
      const int64_t n = std::min<int64_t>(tile, a.channels - c);
      for (int64_t j = 0; j < n; ++j) {
        Op op;
        op.load(a, common, c + j);
        ops.set(j, op);
      }
      const int64_t at_once = rows_at_once(n, a.channels);
      for (int64_t row = begin; row < end; row += at_once)
        tiles.run(a, convert, common, row * a.channels + c, std::min(at_once, end - row), n,
                  [&](int64_t j) APEX_INLINE_LAMBDA { return ops[j]; });
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Op> void apply_channels(const gpu::ChannelApply& a) {
  using Last = ApplyChannelsLast<Op>;
  const int64_t runs = (a.batch + Last::rows_of_run - 1) / Last::rows_of_run;
  if (a.channels_last)
    run_at_level(Last{a}, 0, runs, std::max<int64_t>(1, elements_per_task / (a.channels * Last::rows_of_run)));
  else
    run_at_level(ApplyChannelsFirst<Op>{a}, 0, a.batch * a.channels,
                 std::max<int64_t>(1, elements_per_task / a.spatial));
}
template <template <class> class Channel> void apply_channels_of_type(const gpu::ChannelApply& a) {
  if (a.input_type == APEX_F64) apply_channels<Channel<double>>(a);
  else apply_channels<Channel<float>>(a);
}
}  // namespace apex
