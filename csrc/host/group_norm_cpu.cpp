// The CPU variant of group norm, at each x86-64 level. A task takes whole groups of one image: channels first a group,
// channels last as many as a tile holds, or one. Sums are made in runs, so that no long sum rounds.
#include "channel_tiles.h"
#include "device/group_norm.h"
#include "group_norm.h"

namespace apex {
namespace {
constexpr int64_t run_rows = 32;  // of a sum

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

  // Sums of (x - from[j])^power for each channel of the tile.
  template <int power>
  APEX_INLINE void sum_rows(const TileConversions<Math>& convert, int64_t element, int64_t n, int64_t rows,
                            const Math* from, Math* total) const {
    alignas(64) Math buffer[tile], run[tile];
    fill(total, n, Math(0));
    for (int64_t row = 0; row < rows; row += run_rows) {
      fill(run, n, Math(0));
      for (int64_t r = row; r < std::min<int64_t>(row + run_rows, rows); ++r) {
        const Math* x = load_tile(convert, a.input, a.input_type, element + r * a.channels, n, buffer);
        for (int64_t j = 0; j < n; ++j) {
          const Math d = x[j] - from[j];
          run[j] += power == 1 ? d : d * d;
        }
      }
      for (int64_t j = 0; j < n; ++j) total[j] += run[j];
    }
  }
  template <int power>
  APEX_INLINE Math sum_channel(const TileConversions<Math>& convert, int64_t element, Math from) const {
    alignas(64) Math buffer[tile];
    Math total = Math(0);
    for (int64_t i = 0; i < a.spatial; i += tile) {
      const int64_t n = std::min<int64_t>(tile, a.spatial - i);
      const Math* x = load_tile(convert, a.input, a.input_type, element + i, n, buffer);
      total += sum_tile<Math>(n, [&](int64_t j) { return power == 1 ? x[j] - from : (x[j] - from) * (x[j] - from); });
    }
    return total;
  }
  // What the share's groups come to, added to sums[group].
  template <int power> APEX_INLINE void sum_groups(const TileConversions<Math>& convert, const Share<Math>& s,
                                                   const Math* from, Math* sums) const {
    fill(sums, s.groups, Math(0));
    if (!a.channels_last) {
      for (int64_t c = s.first_channel(); c < s.first_channel() + s.channels(); ++c)
        sums[0] += sum_channel<power>(convert, (s.image * a.channels + c) * a.spatial, from[0]);
      return;
    }
    for_each_tile_of_channels(s, [&](int64_t element, int64_t channel, int64_t n, int64_t rows) {
      alignas(64) Math total[tile], of[tile];
      for (int64_t j = 0; j < n; ++j) of[j] = from[(channel + j - s.first_channel()) / s.group_channels];
      sum_rows<power>(convert, element, n, rows, of, total);
      for (int64_t j = 0; j < n; ++j) sums[(channel + j - s.first_channel()) / s.group_channels] += total[j];
    });
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const bool silu = a.silu != 0;
    alignas(64) Math mean[tile], origin[tile], sums[tile], buffer[tile], y[tile];
    double rstd[tile];
    for (int64_t task = begin; task < end; ++task) {
      const Share<Math> s(a, task);
      const Math count = Math(a.spatial) * Math(s.group_channels);
      // Differences from an element first: sums of a large mean would round.
      for (int64_t g = 0; g < s.groups; ++g) {
        const int64_t channel = (s.first_group + g) * s.group_channels;
        const int64_t element =
            a.channels_last ? s.image * a.spatial * a.channels + channel : (s.image * a.channels + channel) * a.spatial;
        mean[g] = *load_tile(convert, a.input, a.input_type, element, 1, buffer);
      }
      sum_groups<1>(convert, s, mean, sums);
      for (int64_t g = 0; g < s.groups; ++g) mean[g] += sums[g] / count;
      sum_groups<2>(convert, s, mean, sums);
      for (int64_t g = 0; g < s.groups; ++g) {
        // Constants of many elements: what they lose, all of these do.
        rstd[g] = 1 / gpu::sqrt(double(sums[g]) / double(count) + a.eps);
        origin[g] = gpu::origin_of(mean[g], Math(rstd[g]));
        reinterpret_cast<Math*>(a.mean)[s.row_of_statistics() + g] = mean[g];
        reinterpret_cast<Math*>(a.rstd)[s.row_of_statistics() + g] = Math(rstd[g]);
      }
      if (!a.channels_last) {
        for (int64_t c = s.first_channel(); c < s.first_channel() + s.channels(); ++c) {
          const Math scale = Math(rstd[0] * affine(convert, a.weight, a.weight_type, c, Math(1)));
          const Math shift = gpu::fma(origin[0] - mean[0], scale, affine(convert, a.bias, a.weight_type, c, Math(0)));
          for (int64_t i = 0; i < a.spatial; i += tile) {
            const int64_t n = std::min<int64_t>(tile, a.spatial - i),
                          element = (s.image * a.channels + c) * a.spatial + i;
            const Math* x = load_tile(convert, a.input, a.input_type, element, n, buffer);
            for (int64_t j = 0; j < n; ++j) y[j] = gpu::fma(x[j] - origin[0], scale, shift);
            if (silu)
              for (int64_t j = 0; j < n; ++j) y[j] = activated(y[j], true);
            store_tile(convert, a.output, a.input_type, element, n, static_cast<const Math*>(y));
          }
        }
        continue;
      }
      for_each_tile_of_channels(s, [&](int64_t element, int64_t channel, int64_t n, int64_t rows) {
        Affine<Math> w;
        alignas(64) Math from[tile];
        w.load(convert, a, channel, n);
        for (int64_t j = 0; j < n; ++j) {
          const int64_t g = (channel + j - s.first_channel()) / s.group_channels;
          from[j] = origin[g];
          w.weight[j] = Math(rstd[g] * w.weight[j]);
          w.bias[j] = gpu::fma(origin[g] - mean[g], w.weight[j], w.bias[j]);
        }
        for (int64_t row = 0; row < rows; ++row) {
          const Math* x = load_tile(convert, a.input, a.input_type, element + row * a.channels, n, buffer);
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
    const auto each = [&](auto of_tile) {
      for (int64_t c = s.first_channel(); c < s.first_channel() + s.channels(); ++c) {
        const Math weight = affine(convert, a.weight, a.weight_type, c, Math(1)),
                   bias = affine(convert, a.bias, a.weight_type, c, Math(0));
        for (int64_t i = 0; i < a.spatial; i += tile) {
          const int64_t n = std::min<int64_t>(tile, a.spatial - i),
                        element = (s.image * a.channels + c) * a.spatial + i;
          t.load(
              convert, a, element, n, [&](int64_t) { return mean; }, [&](int64_t) { return rstd; },
              [&](int64_t) { return weight; }, [&](int64_t) { return bias; });
          of_tile(c, i, element, n, weight);
        }
      }
    };
    each([&](int64_t c, int64_t i, int64_t, int64_t n, Math) {
      Math* const sums[2] = {of_bias(s.image) + c, of_weight(s.image) + c};
      if (i == 0) *sums[0] = *sums[1] = Math(0);
      *sums[0] += sum_tile<Math>(n, [&](int64_t j) { return t.g[j]; });
      *sums[1] += sum_tile<Math>(n, [&](int64_t j) { return t.g[j] * t.normalized[j]; });
    });
    sum_group(convert, s, s.first_group, &of_one, &of_x);
    each([&](int64_t, int64_t, int64_t element, int64_t n, Math weight) {
      for (int64_t j = 0; j < n; ++j)
        t.g[j] = gpu::fma(t.g[j], weight, -gpu::fma(t.normalized[j], of_x, of_one)) * rstd;
      store_tile(convert, a.output, a.input_type, element, n, static_cast<const Math*>(t.g));
    });
  }

  APEX_INLINE void run_last(const TileConversions<Math>& convert, const Share<Math>& s) const {
    GradientTile<Math> t;
    Affine<Math> w;
    alignas(64) Math mean[tile], rstd[tile], of_one[tile], of_x[tile], group_one[tile], group_x[tile];
    const auto load_channels = [&](int64_t channel, int64_t n) {
      w.load(convert, a, channel, n);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t row = s.image * a.groups + (channel + j) / s.group_channels;
        mean[j] = reinterpret_cast<const Math*>(a.mean)[row];
        rstd[j] = reinterpret_cast<const Math*>(a.rstd)[row];
      }
    };
    const auto load_row = [&](int64_t element, int64_t n) {
      t.load(
          convert, a, element, n, [&](int64_t j) { return mean[j]; }, [&](int64_t j) { return rstd[j]; },
          [&](int64_t j) { return w.weight[j]; }, [&](int64_t j) { return w.bias[j]; });
    };
    for_each_tile_of_channels(s, [&](int64_t element, int64_t channel, int64_t n, int64_t rows) {
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
    for_each_tile_of_channels(s, [&](int64_t element, int64_t channel, int64_t n, int64_t rows) {
      load_channels(channel, n);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t g = (channel + j - s.first_channel()) / s.group_channels;
        of_one[j] = group_one[g];
        of_x[j] = group_x[g];
      }
      for (int64_t row = 0; row < rows; ++row) {
        load_row(element + row * a.channels, n);
        for (int64_t j = 0; j < n; ++j)
          t.g[j] = gpu::fma(t.g[j], w.weight[j], -gpu::fma(t.normalized[j], of_x[j], of_one[j])) * rstd[j];
        store_tile(convert, a.output, a.input_type, element + row * a.channels, n, static_cast<const Math*>(t.g));
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
