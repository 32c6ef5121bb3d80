// The CPU variant of group norm's backward, at each x86-64 level. Sums are made in runs, so that no long sum rounds.
#include <memory>
#include <new>

#include "group_norm_cpu.h"

namespace apex {
namespace {
// Of g (csrc/device/group_norm.h) with SiLU, which takes an exponential each: the first pass keeps that of a task, if
// it is not too large, for the second one.
template <class Math> class Kept {
 public:
  explicit Kept(int64_t elements)
      : memory_(elements && elements <= most ? new (std::nothrow) Math[size_t(elements)] : nullptr) {}
  // Of the task's elements from `i` on; null: it is not kept.
  APEX_INLINE Math* at(int64_t i) const { return memory_ ? memory_.get() + i : nullptr; }

 private:
  static constexpr int64_t most = 65536;
  std::unique_ptr<Math[]> memory_;
};

template <class Math, bool silu> struct Backward {
  const gpu::GroupNorm& a;
  const bool streamed = is_streamed(a.batch * a.channels * a.spatial, a.input_type);

  // What a strip of elements has by itself, or all of them together: functions of the place.
  template <class At> struct Numbers {
    At mean, rstd, weight, bias;
    APEX_INLINE Math normalized(const Math* x, int64_t j) const { return (x[j] - mean(j)) * rstd(j); }
    APEX_INLINE Math g(const Math* dy, int64_t j, Math normalized) const {
      return silu ? dy[j] * gpu::Silu<Math, true>::slope(gpu::fma(normalized, weight(j), bias(j))) : dy[j];
    }
  };

  struct Tile { alignas(64) Math first[strip], second[strip], made[strip]; };
  Math* of_bias(int64_t image) const { return reinterpret_cast<Math*>(a.channel_partials) + image * 2 * a.channels; }
  Math* of_weight(int64_t image) const { return of_bias(image) + a.channels; }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const Shares shares(a);
    const Kept<Math> kept(silu ? shares.of_task * shares.of_group * a.spatial : 0);
    for (int64_t task = begin; task < end; ++task) {
      const Share<Math> s(a, shares, task);
      if (a.channels_last) run_last(convert, s, kept);
      else run_first(convert, s, kept);
    }
  }
  // Sums over a group of what its channels have, over its number of elements.
  APEX_INLINE void sum_group(const TileConversions<Math>& convert, const Share<Math>& s, int64_t group, Math* of_one,
                             Math* of_x) const {
    Math one = Math(0), x = Math(0);
    Affine<Math, lanes> w;
    for (int64_t c = group * s.group_channels, end = c + s.group_channels; c < end; c += lanes) {
      const int64_t channels = std::min<int64_t>(lanes, end - c);
      w.load(convert, a, c, channels);
      for (int64_t k = 0; k < channels; ++k) {
        one += of_bias(s.image)[c + k] * w.weight[k];
        x += of_weight(s.image)[c + k] * w.weight[k];
      }
    }
    const Math count = Math(a.spatial) * Math(s.group_channels);
    *of_one = one / count;
    *of_x = x / count;
  }
  // The second pass, of n elements. kept: null, or what it holds of them.
  template <class Of, class One, class Along>
  APEX_INLINE void write(const TileConversions<Math>& convert, Tile& t, int64_t element, int64_t n, const Math* kept,
                         const Of& of, const One& of_one, const Along& of_x) const {
    const Math* x = load_tile(convert, a.input, a.input_type, element, n, t.first);
    const Math* dy = kept ? kept : load_tile(convert, a.grad_output, a.input_type, element, n, t.second);
    Math* const dx = made_tile(a.output, a.input_type, element, t.made, streamed);
    const auto gradient = [&](int64_t j, Math g, Math normalized) APEX_INLINE_LAMBDA {
      return gpu::fma(g, of.weight(j), -gpu::fma(normalized, of_x(j), of_one(j))) * of.rstd(j);
    };
    if (kept) {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) dx[j] = gradient(j, dy[j], of.normalized(x, j));
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        const Math normalized = of.normalized(x, j);
        dx[j] = gradient(j, of.g(dy, j, normalized), normalized);
      }
    }
    store_tile(convert, a.output, a.input_type, element, n, static_cast<const Math*>(dx), streamed);
  }

  APEX_INLINE void run_first(const TileConversions<Math>& convert, const Share<Math>& s, const Kept<Math>& kept) const {
    const Math mean = reinterpret_cast<const Math*>(a.mean)[s.row_of_statistics()],
               rstd = reinterpret_cast<const Math*>(a.rstd)[s.row_of_statistics()];
    Tile t;
    Math of_one = Math(0), of_x = Math(0);
    // of_strip(channel, first element of the channel, element, count, what is kept, its numbers)
    const auto each = [&](auto of_strip) APEX_INLINE_LAMBDA {
      Affine<Math, lanes> w;
      for (int64_t k = 0; k < s.channels(); ++k) {
        const int64_t channel = s.first_channel() + k;
        if (k % lanes == 0) w.load(convert, a, channel, std::min<int64_t>(lanes, s.channels() - k));
        const auto same = [](Math x) APEX_INLINE_LAMBDA { return [x](int64_t) APEX_INLINE_LAMBDA { return x; }; };
        const Numbers<decltype(same(mean))> of{same(mean), same(rstd), same(w.weight[k % lanes]),
                                               same(w.bias[k % lanes])};
        for (int64_t i = 0; i < a.spatial; i += strip)
          of_strip(channel, i, s.start_of(channel) + i, std::min<int64_t>(strip, a.spatial - i),
                   kept.at(k * a.spatial + i), of);
      }
    };
    each([&](int64_t c, int64_t i, int64_t element, int64_t n, Math* g, const auto& of) APEX_INLINE_LAMBDA {
      const Math* x = load_tile(convert, a.input, a.input_type, element, n, t.first);
      const Math* dy = load_tile(convert, a.grad_output, a.input_type, element, n, t.second);
      Math* const to = g ? g : t.made;
      Lanes<Added, Math> one(Math(0)), along(Math(0));
      each_lane(n, [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA {
        const Math normalized = of.normalized(x, j), gradient = of.g(dy, j, normalized);
        if (silu) to[j] = gradient;
        one.of[l] += gradient;
        along.of[l] += gradient * normalized;
      });
      Math* const sums[2] = {of_bias(s.image) + c, of_weight(s.image) + c};
      if (i == 0) *sums[0] = *sums[1] = Math(0);
      *sums[0] += one.whole(), *sums[1] += along.whole();
    });
    sum_group(convert, s, s.first_group, &of_one, &of_x);
    each([&](int64_t, int64_t, int64_t element, int64_t n, Math* g, const auto& of) APEX_INLINE_LAMBDA {
      write(
          convert, t, element, n, silu ? g : nullptr, of, [&](int64_t) APEX_INLINE_LAMBDA { return of_one; },
          [&](int64_t) APEX_INLINE_LAMBDA { return of_x; });
    });
  }

  // Of the channels of a strip.
  struct Columns {
    Affine<Math, strip> w;
    alignas(64) Math mean[strip], rstd[strip], of_one[strip], of_x[strip];
    APEX_INLINE void load(const TileConversions<Math>& convert, const Share<Math>& s, int64_t channel, int64_t n) {
      w.load(convert, s.a, channel, n);
      s.each_group(channel, n, [&](int64_t j, int64_t count, int64_t g) APEX_INLINE_LAMBDA {
        fill(mean + j, count, reinterpret_cast<const Math*>(s.a.mean)[s.row_of_statistics() + g]);
        fill(rstd + j, count, reinterpret_cast<const Math*>(s.a.rstd)[s.row_of_statistics() + g]);
      });
    }
    APEX_INLINE auto numbers() const {
      const auto at = [](const Math* of)
                          APEX_INLINE_LAMBDA { return [of](int64_t j) APEX_INLINE_LAMBDA { return of[j]; }; };
      return Numbers<decltype(at(mean))>{at(mean), at(rstd), at(w.weight), at(w.bias)};
    }
  };
  APEX_INLINE void run_last(const TileConversions<Math>& convert, const Share<Math>& s, const Kept<Math>& kept) const {
    Tile t;
    Columns columns;
    const auto of = columns.numbers();
    alignas(64) Math group_one[strip], group_x[strip];
    const auto kept_at = [&](int64_t channel, int64_t row) APEX_INLINE_LAMBDA {
      return silu ? kept.at(row * s.channels() + channel - s.first_channel()) : nullptr;
    };
    s.each_strip([&](int64_t element, int64_t channel, int64_t n) APEX_INLINE_LAMBDA {
      columns.load(convert, s, channel, n);
      Math* const one = of_bias(s.image) + channel;
      Math* const along = of_weight(s.image) + channel;
      fill(one, n, Math(0));
      fill(along, n, Math(0));
      for (int64_t row = 0; row < a.spatial; row += run_rows) {
        fill(columns.of_one, n, Math(0));
        fill(columns.of_x, n, Math(0));
        for (int64_t r = row; r < std::min<int64_t>(row + run_rows, a.spatial); ++r) {
          const Math* x = load_tile(convert, a.input, a.input_type, element + r * a.channels, n, t.first);
          const Math* dy = load_tile(convert, a.grad_output, a.input_type, element + r * a.channels, n, t.second);
          Math* const g = kept_at(channel, r);
          Math* const to = g ? g : t.made;
#pragma GCC ivdep
          for (int64_t j = 0; j < n; ++j) {
            const Math normalized = of.normalized(x, j), gradient = of.g(dy, j, normalized);
            if (silu) to[j] = gradient;
            columns.of_one[j] += gradient;
            columns.of_x[j] += gradient * normalized;
          }
        }
        for (int64_t j = 0; j < n; ++j) one[j] += columns.of_one[j];
        for (int64_t j = 0; j < n; ++j) along[j] += columns.of_x[j];
      }
    });
    for (int64_t g = 0; g < s.groups; ++g) sum_group(convert, s, s.first_group + g, group_one + g, group_x + g);
    s.each_strip([&](int64_t element, int64_t channel, int64_t n) APEX_INLINE_LAMBDA {
      columns.load(convert, s, channel, n);
      s.each_group(channel, n, [&](int64_t j, int64_t count, int64_t g) APEX_INLINE_LAMBDA {
        fill(columns.of_one + j, count, group_one[g]);
        fill(columns.of_x + j, count, group_x[g]);
      });
      for (int64_t row = 0; row < a.spatial; ++row)
        write(
            convert, t, element + row * a.channels, n, kept_at(channel, row), of,
            [&](int64_t j) APEX_INLINE_LAMBDA { return columns.of_one[j]; },
            [&](int64_t j) APEX_INLINE_LAMBDA { return columns.of_x[j]; });
    });
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// The images' sums, in order, of tiles of channels.
template <class Math> struct Finish {
  const gpu::GroupNorm& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math sums[tile];
    for (int which = 0; which < 2; ++which) {
      gpu::u8* const to = which ? a.grad_weight : a.grad_bias;
      if (!to) continue;
      for (int64_t c = begin * tile; c < std::min<int64_t>(end * tile, a.channels); c += tile) {
        const int64_t n = std::min<int64_t>(tile, a.channels - c);
        fill(sums, n, Math(0));
        for (int64_t image = 0; image < a.batch; ++image) {
          const Math* x = reinterpret_cast<const Math*>(a.channel_partials) + (image * 2 + which) * a.channels + c;
          for (int64_t j = 0; j < n; ++j) sums[j] += x[j];
        }
        store_tile(convert, to, a.weight_type, c, n, static_cast<const Math*>(sums));
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Math> void backward(const gpu::GroupNorm& a) {
  if (a.silu) run_tasks<Backward<Math, true>>(a);
  else run_tasks<Backward<Math, false>>(a);
  run_at_level(Finish<Math>{a}, 0, (a.channels + tile - 1) / tile,
               std::max<int64_t>(1, elements_per_task / (a.batch * tile)));
}
}  // namespace

void group_norm_backward_cpu(const gpu::GroupNorm& a) {
  a.input_type == APEX_F64 ? backward<double>(a) : backward<float>(a);
}
}  // namespace apex
