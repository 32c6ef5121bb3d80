#pragma once
#include "channel.h"
#include "host/welford_mean_var.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
inline at::Tensor welford_mean_var(const at::Tensor& input, bool channel_last) {
  const Channels channels = channels_of("welford_mean_var", input, channel_last);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const at::Tensor x = input.contiguous(channels.format);
    gpu::ChannelReduce a{};
    set_shape("welford_mean_var", x, channels, std::nullopt, &a);
    const auto options = input.options().dtype(channels.math).memory_format(at::MemoryFormat::Contiguous);
    if (x.numel() == 0) return at::zeros({2 * a.channels + 1}, options);
    const at::Tensor statistics = at::empty({2 * a.channels + 1}, options);
    a.input = const_bytes(x);
    a.sums = bytes_to_write(statistics);
    if (reduce_over_channels("welford_mean_var", place, x, channels, &a, &apex_welford_mean_var_prepare,
                             &apex_welford_mean_var))
      return statistics;
  }
  return call_reference<decltype(welford_mean_var)>("welford_mean_var", input, channel_last);
}
inline at::Tensor welford_mean_var_meta(const at::Tensor& input, bool channel_last) {
  const Channels channels = channels_of("welford_mean_var", input, channel_last);
  return at::empty_symint({2 * channels.count + 1},
                          input.options().dtype(channels.math).memory_format(at::MemoryFormat::Contiguous));
}
}  // namespace apex

APEX_CHANNEL_OP(welford_mean_var)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(welford_mean_var, m) {
  m.def(
      "welford_mean_var",
      [](const at::Tensor& input, bool channel_last) {
        static const auto op = apex::dispatcher_op<at::Tensor(const at::Tensor&, bool)>("apex::welford_mean_var");
        return op.call(input, channel_last);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
