#include "welford_mean_var.h"

#include "channel_reduce_cpu.h"
#include "device/channel_reduce.h"

namespace apex {
namespace {
template <class Math_> struct Welford {
  using Math = Math_;
  using Sum = gpu::Moments<Math>;
  static constexpr bool reads_grad = false;

  Math pivot;  // the channel's first element; moments are those of differences from it

  APEX_INLINE Welford(const gpu::ChannelReduce& a, int64_t channel) : pivot(gpu::load_pivot<Math>(a, channel)) {}
  // In one pass, around the mean of those before. Where that is far from theirs, beside the deviation, in two.
  APEX_INLINE Sum of_tile(const Math* x, const Math*, int64_t n, const Sum& before) const {
    const Math origin = pivot + before.mean;
    const Pair<Math> sums = sums_of<Math>(
        n, [&](int64_t j) APEX_INLINE_LAMBDA { return Pair<Math>{x[j] - origin, (x[j] - origin) * (x[j] - origin)}; });
    const Math apart = sums.first / Math(n), mean = (origin - pivot) + apart, of_origin = apart * sums.first;
    if (of_origin <= sums.second / 4) return Sum::of(Math(n), mean, sums.second - of_origin);
    return Sum::of(Math(n), mean, sum_of<Math>(n, [&](int64_t j) APEX_INLINE_LAMBDA {
                     return (x[j] - pivot - mean) * (x[j] - pivot - mean);
                   }));
  }
  APEX_INLINE void store(const gpu::ChannelReduce& a, const TileConversions<Math>&, int64_t channel,
                         const Sum& sum) const {
    Math* to = reinterpret_cast<Math*>(a.sums);
    to[channel] = pivot + sum.mean;
    to[a.channels + channel] = sum.m2 / sum.count;
    if (channel == 0) to[2 * a.channels] = Math(a.batch * a.spatial);
  }

  struct Rows {
    alignas(64) Math pivot[tile], mean[tile], m2[tile], deviations[tile], squares[tile];
    Math count = Math(0);

    APEX_INLINE Rows(const gpu::ChannelReduce& a, int64_t channel, int64_t n, const Math* x) {
      for (int64_t j = 0; j < n; ++j) {
        pivot[j] = gpu::load_pivot<Math>(a, channel + j);
        mean[j] = x[j] - pivot[j];
        m2[j] = Math(0);
      }
    }
    APEX_INLINE void begin(int64_t n) { std::fill_n(deviations, n, Math(0)), std::fill_n(squares, n, Math(0)); }
    APEX_INLINE void add(const Math* x, const Math*, int64_t n) {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        const Math d = x[j] - pivot[j] - mean[j];
        deviations[j] += d;
        squares[j] += d * d;
      }
    }
    APEX_INLINE void end(int64_t rows, int64_t n) {
      count += Math(rows);
      const Math share = Math(1) / count;
      for (int64_t j = 0; j < n; ++j) {
        const Math step = deviations[j] * share;
        mean[j] += step;
        m2[j] += squares[j] - step * deviations[j];
      }
    }
    APEX_INLINE Sum sum(int64_t j) const { return Sum::of(count, mean[j], m2[j]); }
  };
};

ChannelReduceOp op = {"welford_mean_var", APEX_CHANNEL_KERNELS("welford_mean_var", "welford_mean_var_first"),
                      APEX_CHANNEL_KERNELS("welford_mean_var", "welford_mean_var_last"),
                      APEX_CHANNEL_KERNELS("welford_mean_var", "welford_mean_var_last1"),
                      &reduce_channels_of_type<Welford>};
}  // namespace
}  // namespace apex

extern "C" int32_t apex_welford_mean_var(const apex_place* place, const gpu::ChannelReduce* arguments,
                                         const apex_workspace* workspace) {
  return apex::run_channel_reduce(apex::op, place, *arguments, workspace);
}
