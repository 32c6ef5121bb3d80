// The CPU variant of group norm, at each x86-64 level. A task takes whole groups of one image: channels first a group,
// channels last as many as a tile holds, or one. Sums are made in runs, so that no long sum rounds.
#include "channel_tiles.h"
#include "device/group_norm.h"
#include "group_norm.h"

namespace apex {
namespace {
constexpr int64_t run_rows = 32, at_once = 1024;  // rows of a channel, and elements, of a sum

// Each task's share of an image, and its elements as runs of channels (channels last) or of one channel.
template <class Math> struct Share {
  const gpu::GroupNorm& a;
  int64_t image, group_channels, first_group, groups;

  static int64_t groups_of_task(const gpu::GroupNorm& a) {
    return a.channels_last ? std::max<int64_t>(1, tile / (a.channels / a.groups)) : 1;
  }
  static int64_t tasks_of_image(const gpu::GroupNorm& a) {
    const int64_t of_task = groups_of_task(a);
    return (a.groups + of_task - 1) / of_task;
  }
  Share(const gpu::GroupNorm& arguments, int64_t task) : a(arguments), group_channels(a.channels / a.groups) {
    const int64_t of_image = tasks_of_image(a), of_task = groups_of_task(a);
    image = task / of_image;
    first_group = task % of_image * of_task;
    groups = std::min<int64_t>(of_task, a.groups - first_group);
  }
  int64_t first_channel() const { return first_group * group_channels; }
  int64_t channels() const { return groups * group_channels; }
  int64_t row_of_statistics() const { return image * a.groups + first_group; }
};

template <class Math> APEX_INLINE void fill(Math* x, int64_t n, Math value) {
  for (int64_t j = 0; j < n; ++j) x[j] = value;
}
template <class Math> APEX_INLINE Math affine(const TileConversions<Math>& convert, const void* from, int32_t type,
                                              int64_t i, Math otherwise) {
  Math x;
  return from ? *load_tile(convert, from, type, i, 1, &x) : otherwise;
}

// of_channels(first element of the tensor, channel, count, rows): channels [channel, channel + count) of the share,
// whose elements lie side by side, `rows` times, every a.channels elements.
template <class Math, class Each> APEX_INLINE void for_each_tile_of_channels(const Share<Math>& s,
                                                                             const Each& of_channels) {
  for (int64_t c = 0; c < s.channels(); c += tile) {
    const int64_t channel = s.first_channel() + c;
    of_channels(s.image * s.a.spatial * s.a.channels + channel, channel, std::min<int64_t>(tile, s.channels() - c),
                s.a.spatial);
  }
}

template <class Math> struct Affine {
  alignas(64) Math weight[tile], bias[tile];
  APEX_INLINE void load(const TileConversions<Math>& convert, const gpu::GroupNorm& a, int64_t channel, int64_t n) {
    for (int64_t j = 0; j < n; ++j) {
      weight[j] = affine(convert, a.weight, a.weight_type, channel + j, Math(1));
      bias[j] = affine(convert, a.bias, a.weight_type, channel + j, Math(0));
    }
  }
};

template <class Math> APEX_INLINE Math activated(Math z, bool silu) {
  return silu ? gpu::Silu<Math, true>::value(z) : z;
}

template <class Math> struct Forward {
  const gpu::GroupNorm& a;

  // For each channel of the tile the sums of d = x - from[j] and of d^2.
  APEX_INLINE void sum_rows(const TileConversions<Math>& convert, int64_t element, int64_t n, int64_t rows,
                            const Math* from, Math* total, Math* squares) const {
    alignas(64) Math buffer[tile], run[tile], run_squares[tile];
    fill(total, n, Math(0));
    fill(squares, n, Math(0));
    for (int64_t row = 0; row < rows; row += run_rows) {
      fill(run, n, Math(0));
      fill(run_squares, n, Math(0));
      for (int64_t r = row; r < std::min<int64_t>(row + run_rows, rows); ++r) {
        const Math* x = load_tile(convert, a.input, a.input_type, element + r * a.channels, n, buffer);
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) {
          const Math d = x[j] - from[j];
          run[j] += d;
          run_squares[j] += d * d;
        }
      }
      for (int64_t j = 0; j < n; ++j) total[j] += run[j], squares[j] += run_squares[j];
    }
  }
  APEX_INLINE void sum_channel(const TileConversions<Math>& convert, int64_t element, Math from, double* total,
                               double* squares) const {
    alignas(64) Math buffer[at_once];
    for (int64_t i = 0; i < a.spatial; i += at_once) {
      const int64_t n = std::min<int64_t>(at_once, a.spatial - i);
      const Math* x = load_tile(convert, a.input, a.input_type, element + i, n, buffer);
      Lanes<Added, Math> first(Math(0)), second(Math(0));
      each_lane(n, [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA {
        const Math d = x[j] - from;
        first.of[l] += d;
        second.of[l] += d * d;
      });
      *total += double(first.whole()), *squares += double(second.whole());
    }
  }
  // The mean of some of the `side_by_side` elements of a group that lie together; one where all are equal, however
  // large.
  APEX_INLINE Math pivot_of(const TileConversions<Math>& convert, int64_t element, int64_t side_by_side) const {
    const int64_t n = std::min<int64_t>(16, side_by_side);
    Math buffer[16], sum = Math(0);
    const Math* x = load_tile(convert, a.input, a.input_type, element, n, buffer);
    for (int64_t j = 0; j < n; ++j) sum += (x[j] - x[0]) / Math(n);
    return x[0] + sum;
  }
  // What the share's groups come to: sums of differences from from[group] and of their squares.
  APEX_INLINE void sum_groups(const TileConversions<Math>& convert, const Share<Math>& s, const Math* from,
                              double* sums, double* squares) const {
    for (int64_t g = 0; g < s.groups; ++g) sums[g] = squares[g] = 0;
    if (!a.channels_last) {
      for (int64_t c = s.first_channel(); c < s.first_channel() + s.channels(); ++c)
        sum_channel(convert, (s.image * a.channels + c) * a.spatial, from[0], sums, squares);
      return;
    }
    for_each_tile_of_channels(s, [&](int64_t element, int64_t channel, int64_t n, int64_t rows) APEX_INLINE_LAMBDA {
      alignas(64) Math total[tile], total_squares[tile], of[tile];
      for (int64_t j = 0; j < n; ++j) of[j] = from[(channel + j - s.first_channel()) / s.group_channels];
      sum_rows(convert, element, n, rows, of, total, total_squares);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t g = (channel + j - s.first_channel()) / s.group_channels;
        sums[g] += double(total[j]), squares[g] += double(total_squares[j]);
      }
    });
  }
  // The groups' means, what rounding took from them, and the sums of squares of differences from the exact ones. `mean`
  // holds pivots before. Unless these are near the means, beside the deviations, the squares are added up again.
  APEX_INLINE void measure(const TileConversions<Math>& convert, const Share<Math>& s, Math* mean, double* rounded,
                           double* squares) const {
    const double count = double(a.spatial) * double(s.group_channels);
    double sums[tile];
    bool near = true;
    sum_groups(convert, s, mean, sums, squares);
    for (int64_t g = 0; g < s.groups; ++g) {
      const double of_pivot = sums[g] * sums[g] / count, exact = double(mean[g]) + sums[g] / count;
      near = near && of_pivot <= squares[g] / 4;
      mean[g] = Math(exact);
      rounded[g] = exact - double(mean[g]);
      squares[g] -= of_pivot;
    }
    if (near) return;
    sum_groups(convert, s, mean, sums, squares);
    for (int64_t g = 0; g < s.groups; ++g) squares[g] -= count * rounded[g] * rounded[g];
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const bool silu = a.silu != 0;
    alignas(64) Math mean[tile], origin[tile], rest[tile], buffer[tile], made[tile];
    double rstd[tile], squares[tile], rounded[tile];
    for (int64_t task = begin; task < end; ++task) {
      const Share<Math> s(a, task);
      const double count = double(a.spatial) * double(s.group_channels);
      // Differences from a pivot: sums of a large mean would round.
      for (int64_t g = 0; g < s.groups; ++g) {
        const int64_t channel = (s.first_group + g) * s.group_channels;
        const int64_t element =
            a.channels_last ? s.image * a.spatial * a.channels + channel : (s.image * a.channels + channel) * a.spatial;
        mean[g] = pivot_of(convert, element, a.channels_last ? s.group_channels : a.spatial);
      }
      measure(convert, s, mean, rounded, squares);
      for (int64_t g = 0; g < s.groups; ++g) {
        // Constants of many elements: what they lose, all of these do.
        rstd[g] = 1 / gpu::sqrt(squares[g] / count + a.eps);
        origin[g] = gpu::origin_of(mean[g], Math(rstd[g]));
        rest[g] = Math(double(origin[g]) - double(mean[g]) - rounded[g]);
        reinterpret_cast<Math*>(a.mean)[s.row_of_statistics() + g] = mean[g];
        reinterpret_cast<Math*>(a.rstd)[s.row_of_statistics() + g] = Math(rstd[g]);
      }
      if (!a.channels_last) {
        for (int64_t c = s.first_channel(); c < s.first_channel() + s.channels(); ++c) {
          const Math scale = Math(rstd[0] * affine(convert, a.weight, a.weight_type, c, Math(1)));
          const Math shift = gpu::fma(rest[0], scale, affine(convert, a.bias, a.weight_type, c, Math(0)));
          for (int64_t i = 0; i < a.spatial; i += tile) {
            const int64_t n = std::min<int64_t>(tile, a.spatial - i),
                          element = (s.image * a.channels + c) * a.spatial + i;
            const Math* x = load_tile(convert, a.input, a.input_type, element, n, buffer);
            Math* const y = made_tile(a.output, a.input_type, element, made);
#pragma GCC ivdep
            for (int64_t j = 0; j < n; ++j) y[j] = gpu::fma(x[j] - origin[0], scale, shift);
            if (silu)
              for (int64_t j = 0; j < n; ++j) y[j] = activated(y[j], true);
            store_tile(convert, a.output, a.input_type, element, n, static_cast<const Math*>(y));
          }
        }
        continue;
      }
      for_each_tile_of_channels(s, [&](int64_t element, int64_t channel, int64_t n, int64_t rows) APEX_INLINE_LAMBDA {
        Affine<Math> w;
        alignas(64) Math from[tile];
        w.load(convert, a, channel, n);
        for (int64_t j = 0; j < n; ++j) {
          const int64_t g = (channel + j - s.first_channel()) / s.group_channels;
          from[j] = origin[g];
          w.weight[j] = Math(rstd[g] * w.weight[j]);
          w.bias[j] = gpu::fma(rest[g], w.weight[j], w.bias[j]);
        }
        for (int64_t row = 0; row < rows; ++row) {
          const Math* x = load_tile(convert, a.input, a.input_type, element + row * a.channels, n, buffer);
          Math* const y = made_tile(a.output, a.input_type, element + row * a.channels, made);
#pragma GCC ivdep
          for (int64_t j = 0; j < n; ++j) y[j] = gpu::fma(x[j] - from[j], w.weight[j], w.bias[j]);
          if (silu)
            for (int64_t j = 0; j < n; ++j) y[j] = activated(y[j], true);
          store_tile(convert, a.output, a.input_type, element + row * a.channels, n, static_cast<const Math*>(y));
        }
      });
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// Normalised input and g (csrc/device/group_norm.h) of elements that have channels of their own, or of one channel.
template <class Math> struct GradientTile {
  alignas(64) Math normalized[tile], g[tile], first[tile], second[tile];

  template <class Mean, class Rstd, class Weight, class Bias>
  APEX_INLINE void load(const TileConversions<Math>& convert, const gpu::GroupNorm& a, int64_t element, int64_t n,
                        const Mean& mean, const Rstd& rstd, const Weight& weight, const Bias& bias) {
    const Math* x = load_tile(convert, a.input, a.input_type, element, n, first);
    const Math* dy = load_tile(convert, a.grad_output, a.input_type, element, n, second);
    for (int64_t j = 0; j < n; ++j) normalized[j] = (x[j] - mean(j)) * rstd(j);
    if (a.silu) {
      for (int64_t j = 0; j < n; ++j)
        g[j] = dy[j] * gpu::Silu<Math, true>::slope(gpu::fma(normalized[j], weight(j), bias(j)));
    } else {
      for (int64_t j = 0; j < n; ++j) g[j] = dy[j];
    }
  }
};

template <class Math> struct Backward {
  const gpu::GroupNorm& a;

  Math* of_bias(int64_t image) const { return reinterpret_cast<Math*>(a.channel_partials) + image * 2 * a.channels; }
  Math* of_weight(int64_t image) const { return of_bias(image) + a.channels; }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    for (int64_t task = begin; task < end; ++task) {
      const Share<Math> s(a, task);
      if (a.channels_last) run_last(convert, s);
      else run_first(convert, s);
    }
  }
  // Sums over a group of what its channels have, over its number of elements.
  APEX_INLINE void sum_group(const TileConversions<Math>& convert, const Share<Math>& s, int64_t group, Math* of_one,
                             Math* of_x) const {
    Math one = Math(0), x = Math(0);
    for (int64_t c = group * s.group_channels; c < (group + 1) * s.group_channels; ++c) {
      const Math weight = affine(convert, a.weight, a.weight_type, c, Math(1));
      one += of_bias(s.image)[c] * weight;
      x += of_weight(s.image)[c] * weight;
    }
    const Math count = Math(a.spatial) * Math(s.group_channels);
    *of_one = one / count;
    *of_x = x / count;
  }

  APEX_INLINE void run_first(const TileConversions<Math>& convert, const Share<Math>& s) const {
    const Math mean = reinterpret_cast<const Math*>(a.mean)[s.row_of_statistics()],
               rstd = reinterpret_cast<const Math*>(a.rstd)[s.row_of_statistics()];
    GradientTile<Math> t;
    Math of_one = Math(0), of_x = Math(0);
    const auto each = [&](auto of_tile) APEX_INLINE_LAMBDA {
      for (int64_t c = s.first_channel(); c < s.first_channel() + s.channels(); ++c) {
        const Math weight = affine(convert, a.weight, a.weight_type, c, Math(1)),
                   bias = affine(convert, a.bias, a.weight_type, c, Math(0));
        for (int64_t i = 0; i < a.spatial; i += tile) {
          const int64_t n = std::min<int64_t>(tile, a.spatial - i),
                        element = (s.image * a.channels + c) * a.spatial + i;
          t.load(
              convert, a, element, n, [&](int64_t) APEX_INLINE_LAMBDA { return mean; },
              [&](int64_t) APEX_INLINE_LAMBDA { return rstd; }, [&](int64_t) APEX_INLINE_LAMBDA { return weight; },
              [&](int64_t) APEX_INLINE_LAMBDA { return bias; });
          of_tile(c, i, element, n, weight);
        }
      }
    };
    each([&](int64_t c, int64_t i, int64_t, int64_t n, Math) APEX_INLINE_LAMBDA {
      Math* const sums[2] = {of_bias(s.image) + c, of_weight(s.image) + c};
      if (i == 0) *sums[0] = *sums[1] = Math(0);
      *sums[0] += sum_of<Math>(n, [&](int64_t j) APEX_INLINE_LAMBDA { return t.g[j]; });
      *sums[1] += sum_of<Math>(n, [&](int64_t j) APEX_INLINE_LAMBDA { return t.g[j] * t.normalized[j]; });
    });
    sum_group(convert, s, s.first_group, &of_one, &of_x);
    each([&](int64_t, int64_t, int64_t element, int64_t n, Math weight) APEX_INLINE_LAMBDA {
      Math* const dx = made_tile(a.output, a.input_type, element, t.first);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) dx[j] = gpu::fma(t.g[j], weight, -gpu::fma(t.normalized[j], of_x, of_one)) * rstd;
      store_tile(convert, a.output, a.input_type, element, n, static_cast<const Math*>(dx));
    });
  }

  APEX_INLINE void run_last(const TileConversions<Math>& convert, const Share<Math>& s) const {
    GradientTile<Math> t;
    Affine<Math> w;
    alignas(64) Math mean[tile], rstd[tile], of_one[tile], of_x[tile], group_one[tile], group_x[tile];
    const auto load_channels = [&](int64_t channel, int64_t n) APEX_INLINE_LAMBDA {
      w.load(convert, a, channel, n);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t row = s.image * a.groups + (channel + j) / s.group_channels;
        mean[j] = reinterpret_cast<const Math*>(a.mean)[row];
        rstd[j] = reinterpret_cast<const Math*>(a.rstd)[row];
      }
    };
    const auto load_row = [&](int64_t element, int64_t n) APEX_INLINE_LAMBDA {
      t.load(
          convert, a, element, n, [&](int64_t j) APEX_INLINE_LAMBDA { return mean[j]; },
          [&](int64_t j) APEX_INLINE_LAMBDA { return rstd[j]; },
          [&](int64_t j) APEX_INLINE_LAMBDA { return w.weight[j]; },
          [&](int64_t j) APEX_INLINE_LAMBDA { return w.bias[j]; });
    };
    for_each_tile_of_channels(s, [&](int64_t element, int64_t channel, int64_t n, int64_t rows) APEX_INLINE_LAMBDA {
      load_channels(channel, n);
      Math* const one = of_bias(s.image) + channel;
      Math* const along = of_weight(s.image) + channel;
      fill(one, n, Math(0));
      fill(along, n, Math(0));
      for (int64_t row = 0; row < rows; row += run_rows) {
        fill(of_one, n, Math(0));
        fill(of_x, n, Math(0));
        for (int64_t r = row; r < std::min<int64_t>(row + run_rows, rows); ++r) {
          load_row(element + r * a.channels, n);
          for (int64_t j = 0; j < n; ++j) of_one[j] += t.g[j];
          for (int64_t j = 0; j < n; ++j) of_x[j] += t.g[j] * t.normalized[j];
        }
        for (int64_t j = 0; j < n; ++j) one[j] += of_one[j];
        for (int64_t j = 0; j < n; ++j) along[j] += of_x[j];
      }
    });
    for (int64_t g = 0; g < s.groups; ++g) sum_group(convert, s, s.first_group + g, group_one + g, group_x + g);
    for_each_tile_of_channels(s, [&](int64_t element, int64_t channel, int64_t n, int64_t rows) APEX_INLINE_LAMBDA {
      load_channels(channel, n);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t g = (channel + j - s.first_channel()) / s.group_channels;
        of_one[j] = group_one[g];
        of_x[j] = group_x[g];
      }
      for (int64_t row = 0; row < rows; ++row) {
        load_row(element + row * a.channels, n);
        Math* const dx = made_tile(a.output, a.input_type, element + row * a.channels, t.first);
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j)
          dx[j] = gpu::fma(t.g[j], w.weight[j], -gpu::fma(t.normalized[j], of_x[j], of_one[j])) * rstd[j];
        store_tile(convert, a.output, a.input_type, element + row * a.channels, n, static_cast<const Math*>(dx));
      }
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

template <class Work, class Math> void run_tasks(const gpu::GroupNorm& a) {
  const int64_t of_image = Share<Math>::tasks_of_image(a), elements = a.channels * a.spatial / of_image;
  run_at_level(Work{a}, 0, a.batch * of_image,
               std::max<int64_t>(1, elements_per_task / std::max<int64_t>(1, elements)));
}
template <class Math> void backward(const gpu::GroupNorm& a) {
  run_tasks<Backward<Math>, Math>(a);
  run_at_level(Finish<Math>{a}, 0, (a.channels + tile - 1) / tile,
               std::max<int64_t>(1, elements_per_task / (a.batch * tile)));
}
}  // namespace

void group_norm_forward_cpu(const gpu::GroupNorm& a) {
  a.input_type == APEX_F64 ? run_tasks<Forward<double>, double>(a) : run_tasks<Forward<float>, float>(a);
}
void group_norm_backward_cpu(const gpu::GroupNorm& a) {
  a.input_type == APEX_F64 ? backward<double>(a) : backward<float>(a);
}
}  // namespace apex
