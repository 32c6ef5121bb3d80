// The CPU variant of batch norm's reductions. Channels first, a task takes whole channels; channels last, parts of the
// rows, which are added up in order. Neither depends on the number of threads.
#pragma once
#include "device/welford.h"
#include "host/channel.h"
#include "host/channel_tiles.h"

namespace apex {
// `Reduction`, made of the arguments and a channel, has
//   Sum                              what elements of a channel come to (welford.h)
//   of_tile(x, dy, n, sum)           of some elements of one channel; sum: of those before
//   store(a, convert, channel, sum)  the channel's results
//   Rows                             of adjacent channels: begin and end around some rows, add for each, sum(j)
template <class Reduction> struct ReduceChannelsFirst {
  using Math = typename Reduction::Math;
  const gpu::ChannelReduce& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    constexpr int64_t piece = 2048;  // what comes of some elements is merged with what came of those before: not often
    alignas(64) Math first[piece], second[piece];
    for (int64_t channel = begin; channel < end; ++channel) {
      const Reduction reduction(a, channel);
      typename Reduction::Sum sum{};
      for (int64_t image = 0; image < a.batch; ++image) {
        const int64_t base = (image * a.channels + channel) * a.spatial;
        for (int64_t i = 0; i < a.spatial; i += piece) {
          const int64_t n = std::min<int64_t>(piece, a.spatial - i);
          const Math* x = load_tile(convert, a.input, a.input_type, base + i, n, first);
          const Math* dy =
              Reduction::reads_grad ? load_tile(convert, a.grad_output, a.input_type, base + i, n, second) : nullptr;
          sum.merge(reduction.of_tile(x, dy, n, sum));
        }
      }
      reduction.store(a, convert, channel, sum);
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

constexpr int64_t run_rows = 32;  // of a channel, that are added up by themselves

// A tile of channels, of some rows of a part.
template <class Reduction> struct ReduceChannelsLast {
  using Math = typename Reduction::Math;
  const gpu::ChannelReduce& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math first[piece], second[piece];
    for (int64_t part = begin; part < end; ++part) {
      const int64_t from = a.batch * part / a.parts, to = a.batch * (part + 1) / a.parts;
      for (int64_t c = 0; c < a.channels; c += tile) {
        const int64_t n = std::min<int64_t>(tile, a.channels - c);
        typename Reduction::Rows rows(a, c, n,
                                      load_tile(convert, a.input, a.input_type, from * a.channels + c, n, first));
        const int64_t at_once = rows_at_once(n, a.channels);
        for (int64_t row = from; row < to; row += run_rows) {
          const int64_t last = std::min(row + run_rows, to);
          rows.begin(n);
          for (int64_t r = row; r < last; r += at_once) {
            const int64_t count = std::min(at_once, last - r), base = r * a.channels + c;
            const Math* x = load_tile(convert, a.input, a.input_type, base, count * n, first);
            const Math* dy = Reduction::reads_grad
                                 ? load_tile(convert, a.grad_output, a.input_type, base, count * n, second)
                                 : nullptr;
            fetch_ahead<Math>(a.input, a.input_type, base, count * n);
            if (Reduction::reads_grad) fetch_ahead<Math>(a.grad_output, a.input_type, base, count * n);
            if (Reduction::reads_grad) dy = mask_tile(a.bitmask, base, count * n, dy, second);
            for (int64_t k = 0; k < count; ++k) rows.add(x + k * n, Reduction::reads_grad ? dy + k * n : dy, n);
          }
          rows.end(last - row, n);
        }
        Math* sums = partial(part, c);
        for (int64_t j = 0; j < n; ++j) {
          const auto sum = rows.sum(j);
          sums[j] = sum.count;
          sums[a.channels + j] = sum.first();
          sums[2 * a.channels + j] = sum.second();
        }
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
  Math* partial(int64_t part, int64_t channel) const {
    return reinterpret_cast<Math*>(a.partials) + part * 3 * a.channels + channel;
  }
};

template <class Reduction> struct MergeParts {
  using Math = typename Reduction::Math;
  const gpu::ChannelReduce& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    for (int64_t channel = begin; channel < end; ++channel) {
      typename Reduction::Sum sum{};
      for (int64_t part = 0; part < a.parts; ++part) {
        const Math* from = ReduceChannelsLast<Reduction>{a}.partial(part, channel);
        sum.merge(Reduction::Sum::of(from[0], from[a.channels], from[2 * a.channels]));
      }
      Reduction(a, channel).store(a, convert, channel, sum);
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Reduction> void reduce_channels(const gpu::ChannelReduce& a) {
  const int64_t elements = a.batch * a.spatial;
  if (!a.channels_last) {
    run_at_level(ReduceChannelsFirst<Reduction>{a}, 0, a.channels, std::max<int64_t>(1, elements_per_task / elements));
    return;
  }
  const int64_t of_part = std::max<int64_t>(1, elements / a.parts * a.channels);
  run_at_level(ReduceChannelsLast<Reduction>{a}, 0, a.parts, std::max<int64_t>(1, elements_per_task / of_part));
  run_at_level(MergeParts<Reduction>{a}, 0, a.channels, std::max<int64_t>(1, elements_per_task / a.parts));
}
template <template <class> class Reduction> void reduce_channels_of_type(const gpu::ChannelReduce& a) {
  if (a.input_type == APEX_F64) reduce_channels<Reduction<double>>(a);
  else reduce_channels<Reduction<float>>(a);
}
}  // namespace apex
