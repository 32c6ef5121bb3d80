// The CPU variant of group norm's forward, at each x86-64 level. Sums are made in runs, so that no long sum rounds.
#include "group_norm_cpu.h"

namespace apex {
namespace {
constexpr int64_t at_once = 1024;  // elements of a sum

template <class Math> struct Forward {
  const gpu::GroupNorm& a;
  const bool streamed = is_streamed(a.batch * a.channels * a.spatial, a.input_type);

  // For each channel of a strip the sums of d = x - from[j] and of d^2.
  APEX_INLINE void sum_rows(const TileConversions<Math>& convert, int64_t element, int64_t n, const Math* from,
                            Math* total, Math* squares) const {
    constexpr int64_t together = 4;  // rows: sums are read and written once for all of them
    alignas(64) Math buffer[together][strip], run[strip], run_squares[strip];
    fill(total, n, Math(0));
    fill(squares, n, Math(0));
    const auto row_at = [&](int64_t row, int64_t k) APEX_INLINE_LAMBDA {
      fetch_ahead<Math>(a.input, a.input_type, element + (row + k) * a.channels, n);
      return load_tile(convert, a.input, a.input_type, element + (row + k) * a.channels, n, buffer[k]);
    };
    for (int64_t row = 0; row < a.spatial; row += run_rows) {
      const int64_t end = std::min<int64_t>(row + run_rows, a.spatial);
      fill(run, n, Math(0));
      fill(run_squares, n, Math(0));
      int64_t r = row;
      for (; r + together <= end; r += together) {
        const Math *x0 = row_at(r, 0), *x1 = row_at(r, 1), *x2 = row_at(r, 2), *x3 = row_at(r, 3);
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) {
          const Math pivot = from[j], d0 = x0[j] - pivot, d1 = x1[j] - pivot, d2 = x2[j] - pivot, d3 = x3[j] - pivot;
          run[j] = run[j] + d0 + d1 + d2 + d3;
          run_squares[j] = run_squares[j] + d0 * d0 + d1 * d1 + d2 * d2 + d3 * d3;
        }
      }
      for (; r < end; ++r) {
        const Math* x = row_at(r, 0);
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
  // Pivots: the mean of some of a group's elements, from all over it where it is large; one where all are equal,
  // however large.
  APEX_INLINE Math pivot_first(const TileConversions<Math>& convert, const Share<Math>& s) const {
    constexpr int64_t some = 16;
    const int64_t begin = s.start_of(s.first_channel()), count = s.channels() * a.spatial;
    alignas(64) Math buffer[some], spread[some], sum = Math(0);
    if (count < some) return *load_tile(convert, a.input, a.input_type, begin, 1, buffer);
    const Math* x = spread;
    if (count < 256 * some) x = load_tile(convert, a.input, a.input_type, begin, some, buffer);
    else
      for (int64_t k = 0; k < some; ++k)
        spread[k] = *load_tile(convert, a.input, a.input_type, begin + count / some * k, 1, buffer);
    for (int64_t k = 0; k < some; ++k) sum += (x[k] - x[0]) / Math(some);
    return x[0] + sum;
  }
  APEX_INLINE void pivots_last(const TileConversions<Math>& convert, const Share<Math>& s, Math* pivots) const {
    const int64_t rows = std::clamp<int64_t>(a.spatial / 16, 1, 16);
    double sums[strip];
    fill(sums, s.groups, 0.0);
    s.each_strip([&](int64_t element, int64_t channel, int64_t n) APEX_INLINE_LAMBDA {
      alignas(64) Math buffer[strip], from[strip], total[strip];
      fill(total, n, Math(0));
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = element + a.spatial / rows * row * a.channels;
        const Math* x = load_tile(convert, a.input, a.input_type, at, n, buffer);
        if (row == 0)
          s.each_group(channel, n, [&](int64_t j, int64_t count, int64_t g) APEX_INLINE_LAMBDA {
            if (channel + j == (s.first_group + g) * s.group_channels) pivots[g] = x[j];
            fill(from + j, count, pivots[g]);
          });
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) total[j] += x[j] - from[j];
      }
      s.each_group(channel, n, [&](int64_t j, int64_t count, int64_t g) APEX_INLINE_LAMBDA {
        for (int64_t k = j; k < j + count; ++k) sums[g] += double(total[k]);
      });
    });
    for (int64_t g = 0; g < s.groups; ++g) pivots[g] += Math(sums[g] / double(rows * s.group_channels));
  }
  // What the share's groups come to: sums of differences from from[group] and of their squares.
  APEX_INLINE void sum_groups(const TileConversions<Math>& convert, const Share<Math>& s, const Math* from,
                              double* sums, double* squares) const {
    if (!a.channels_last) {
      sums[0] = squares[0] = 0;
      for (int64_t c = s.first_channel(); c < s.first_channel() + s.channels(); ++c)
        sum_channel(convert, s.start_of(c), from[0], sums, squares);
      return;
    }
    for (int64_t g = 0; g < s.groups; ++g) sums[g] = squares[g] = 0;
    s.each_strip([&](int64_t element, int64_t channel, int64_t n) APEX_INLINE_LAMBDA {
      alignas(64) Math total[strip], total_squares[strip], of[strip];
      s.each_group(channel, n,
                   [&](int64_t j, int64_t count, int64_t g) APEX_INLINE_LAMBDA { fill(of + j, count, from[g]); });
      sum_rows(convert, element, n, of, total, total_squares);
      s.each_group(channel, n, [&](int64_t j, int64_t count, int64_t g) APEX_INLINE_LAMBDA {
        for (int64_t k = j; k < j + count; ++k) sums[g] += double(total[k]), squares[g] += double(total_squares[k]);
      });
    });
  }
  // The groups' means, what rounding took from them, and the sums of squares of differences from the exact ones. `mean`
  // holds pivots before. Unless these are near the means, beside the deviations, the squares are added up again.
  APEX_INLINE void measure(const TileConversions<Math>& convert, const Share<Math>& s, Math* mean, double* rounded,
                           double* squares) const {
    const double count = double(a.spatial) * double(s.group_channels), by_count = 1 / count;
    double sums[strip];
    bool near = true;
    sum_groups(convert, s, mean, sums, squares);
    for (int64_t g = 0; g < s.groups; ++g) {
      const double apart = sums[g] * by_count, of_pivot = sums[g] * apart, exact = double(mean[g]) + apart;
      near = near && of_pivot <= squares[g] / 4;
      mean[g] = Math(exact);
      rounded[g] = exact - double(mean[g]);
      squares[g] -= of_pivot;
    }
    if (near) return;
    sum_groups(convert, s, mean, sums, squares);
    for (int64_t g = 0; g < s.groups; ++g) squares[g] -= count * rounded[g] * rounded[g];
  }

  // n elements, whose numbers are found by their places.
  template <class Origin, class Scale, class Shift>
  APEX_INLINE void write(const TileConversions<Math>& convert, int64_t element, int64_t n, const Origin& origin,
                         const Scale& scale, const Shift& shift) const {
    alignas(64) Math buffer[strip], made[strip];
    const Math* x = load_tile(convert, a.input, a.input_type, element, n, buffer);
    Math* const y = made_tile(a.output, a.input_type, element, made, streamed);
    if (a.silu) {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j)
        y[j] = gpu::Silu<Math, true>::value(gpu::fma(x[j] - origin(j), scale(j), shift(j)));
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) y[j] = gpu::fma(x[j] - origin(j), scale(j), shift(j));
    }
    store_tile(convert, a.output, a.input_type, element, n, static_cast<const Math*>(y), streamed);
  }
  APEX_INLINE void write_first(const TileConversions<Math>& convert, const Share<Math>& s, Math origin, Math rest,
                               double rstd) const {
    Affine<Math, lanes> w;
    for (int64_t begin = s.first_channel(), end = begin + s.channels(); begin < end; begin += lanes) {
      const int64_t channels = std::min<int64_t>(lanes, end - begin);
      w.load(convert, a, begin, channels);
      for (int64_t c = 0; c < channels; ++c) {
        const Math scale = Math(rstd * w.weight[c]), shift = gpu::fma(rest, scale, w.bias[c]);
        for (int64_t i = 0; i < a.spatial; i += strip)
          write(
              convert, s.start_of(begin + c) + i, std::min<int64_t>(strip, a.spatial - i),
              [&](int64_t) APEX_INLINE_LAMBDA { return origin; }, [&](int64_t) APEX_INLINE_LAMBDA { return scale; },
              [&](int64_t) APEX_INLINE_LAMBDA { return shift; });
      }
    }
  }
  APEX_INLINE void write_last(const TileConversions<Math>& convert, const Share<Math>& s, const Math* origin,
                              const Math* rest, const double* rstd) const {
    s.each_strip([&](int64_t element, int64_t channel, int64_t n) APEX_INLINE_LAMBDA {
      Affine<Math, strip> w;
      alignas(64) Math from[strip];
      w.load(convert, a, channel, n);
      s.each_group(channel, n, [&](int64_t j, int64_t count, int64_t g) APEX_INLINE_LAMBDA {
        for (int64_t k = j; k < j + count; ++k) {
          from[k] = origin[g];
          w.weight[k] = Math(rstd[g] * w.weight[k]);
          w.bias[k] = gpu::fma(rest[g], w.weight[k], w.bias[k]);
        }
      });
      for (int64_t row = 0; row < a.spatial; ++row)
        write(
            convert, element + row * a.channels, n, [&](int64_t j) APEX_INLINE_LAMBDA { return from[j]; },
            [&](int64_t j) APEX_INLINE_LAMBDA { return w.weight[j]; },
            [&](int64_t j) APEX_INLINE_LAMBDA { return w.bias[j]; });
    });
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const Shares shares(a);
    const double by_count = 1 / (double(a.spatial) * double(shares.of_group));
    alignas(64) Math mean[strip], origin[strip], rest[strip];
    double rstd[strip], squares[strip], rounded[strip];
    for (int64_t task = begin; task < end; ++task) {
      const Share<Math> s(a, shares, task);
      // Differences from a pivot: sums of a large mean would round.
      if (a.channels_last) pivots_last(convert, s, mean);
      else mean[0] = pivot_first(convert, s);
      measure(convert, s, mean, rounded, squares);
      for (int64_t g = 0; g < s.groups; ++g) {
        // Constants of many elements: what they lose, all of these do.
        rstd[g] = 1 / gpu::sqrt(squares[g] * by_count + a.eps);
        origin[g] = gpu::origin_of(mean[g], Math(rstd[g]));
        rest[g] = Math(double(origin[g]) - double(mean[g]) - rounded[g]);
        reinterpret_cast<Math*>(a.mean)[s.row_of_statistics() + g] = mean[g];
        reinterpret_cast<Math*>(a.rstd)[s.row_of_statistics() + g] = Math(rstd[g]);
      }
      if (a.channels_last) write_last(convert, s, origin, rest, rstd);
      else write_first(convert, s, origin[0], rest[0], rstd[0]);
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};
}  // namespace

void group_norm_forward_cpu(const gpu::GroupNorm& a) {
  a.input_type == APEX_F64 ? run_tasks<Forward<double>>(a) : run_tasks<Forward<float>>(a);
}
}  // namespace apex
