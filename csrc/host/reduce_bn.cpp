#include "reduce_bn.h"

#include "channel_reduce_cpu.h"

namespace apex {
namespace {
template <class Math_> struct GradientSums {
  using Math = Math_;
  using Sum = gpu::TwoSums<Math>;
  static constexpr bool reads_grad = true;
  Math mean, inv_std;

  APEX_INLINE GradientSums(const gpu::ChannelReduce& a, int64_t channel)
      : mean(reinterpret_cast<const Math*>(a.mean)[channel]),
        inv_std(reinterpret_cast<const Math*>(a.inv_std)[channel]) {}
  APEX_INLINE Sum of_tile(const Math* x, const Math* dy, int64_t n, const Sum&) const {
    const Pair<Math> sums =
        sums_of<Math>(n, [&](int64_t j) APEX_INLINE_LAMBDA { return Pair<Math>{dy[j], dy[j] * (x[j] - mean)}; });
    return Sum::of(Math(0), sums.first, sums.second);
  }
  APEX_INLINE void store(const gpu::ChannelReduce& a, const TileConversions<Math>& convert, int64_t channel,
                         const Sum& sum) const {
    Math* to = reinterpret_cast<Math*>(a.sums);
    to[channel] = sum.sums[0];
    to[a.channels + channel] = sum.sums[1];
    const Math of_weight = sum.sums[1] * inv_std;
    if (a.grad_weight) store_tile(convert, a.grad_weight, a.weight_type, channel, 1, &of_weight);
    if (a.grad_bias) store_tile(convert, a.grad_bias, a.weight_type, channel, 1, &sum.sums[0]);
  }

  struct Rows {
    alignas(64) Math of_dy[tile] = {}, of_dy_xmu[tile] = {};
    const Math* mean;

    APEX_INLINE Rows(const gpu::ChannelReduce& a, int64_t channel, int64_t, const Math*)
        : mean(reinterpret_cast<const Math*>(a.mean) + channel) {}
    APEX_INLINE void begin(int64_t) {}
    APEX_INLINE void add(const Math* x, const Math* dy, int64_t n) {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        of_dy[j] += dy[j];
        of_dy_xmu[j] += dy[j] * (x[j] - mean[j]);
      }
    }
    APEX_INLINE void end(int64_t, int64_t) {}
    APEX_INLINE Sum sum(int64_t j) const { return Sum::of(Math(0), of_dy[j], of_dy_xmu[j]); }
  };
};

ChannelReduceOp op = {"reduce_bn", APEX_CHANNEL_KERNELS("reduce_bn", "reduce_bn_first"),
                      APEX_CHANNEL_KERNELS("reduce_bn", "reduce_bn_last"),
                      APEX_CHANNEL_KERNELS("reduce_bn", "reduce_bn_last1"), &reduce_channels_of_type<GradientSums>};
// Masks are of channels-last tensors alone: `first` is never launched.
ChannelReduceOp masked = {"reduce_bn", APEX_CHANNEL_KERNELS("reduce_bn", "reduce_bn_first"),
                          APEX_CHANNEL_KERNELS("reduce_bn", "reduce_bn_masked_last"),
                          APEX_CHANNEL_KERNELS("reduce_bn", "reduce_bn_masked_last1"),
                          &reduce_channels_of_type<GradientSums>};
ChannelReduceOp& op_of(const gpu::ChannelReduce& a) { return a.bitmask ? masked : op; }
}  // namespace
}  // namespace apex

extern "C" int32_t apex_reduce_bn(const apex_place* place, const gpu::ChannelReduce* arguments,
                                  const apex_workspace* workspace) {
  return apex::run_channel_reduce(apex::op_of(*arguments), place, *arguments, workspace);
}
