#pragma once
#include "channel.h"
#include "host/reduce_bn.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
struct ReducedGradients {
  at::Tensor sums, weight, bias;  // the last two without elements where there is no weight
};
inline ReducedGradients reduced_gradients(const at::Tensor& input, const Channels& channels,
                                          const OptionalTensor& weight) {
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous);
  const auto like = [&] {
    return has_value(weight) ? at::empty_symint({channels.count}, weight->options())
                             : at::empty({0}, options.dtype(channels.math));
  };
  return {at::empty_symint({2 * channels.count}, options.dtype(channels.math)), like(), like()};
}
inline Channels check_reduce_bn(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean,
                                const at::Tensor& inv_std, const OptionalTensor& weight, bool channel_last,
                                const OptionalTensor& bitmask) {
  const Channels channels = (has_value(bitmask) ? nhwc_channels_of : channels_of)("reduce_bn", input, channel_last);
  check_bitmask("reduce_bn", bitmask, input);
  check_gradient("reduce_bn", grad_output, input);
  check_given("reduce_bn", "mean", mean);
  check_given("reduce_bn", "inv_std", inv_std);
  check_statistic("reduce_bn", "mean", mean, input, channels);
  check_statistic("reduce_bn", "inv_std", inv_std, input, channels);
  check_affine("reduce_bn", weight, std::nullopt, input, channels);
  return channels;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> reduce_bn(const at::Tensor& grad_output, const at::Tensor& input,
                                                                const at::Tensor& mean, const at::Tensor& inv_std,
                                                                const OptionalTensor& weight, bool channel_last,
                                                                const OptionalTensor& bitmask) {
  const Channels channels = check_reduce_bn(grad_output, input, mean, inv_std, weight, channel_last, bitmask);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const at::Tensor x = input.contiguous(channels.format), dy = grad_output.contiguous(channels.format),
                     m = mean.contiguous(), r = inv_std.contiguous(),
                     mask = in_format(bitmask, at::MemoryFormat::Contiguous);
    gpu::ChannelReduce a{};
    set_shape("reduce_bn", x, channels, weight, &a);
    const ReducedGradients made = reduced_gradients(x, channels, weight);
    if (x.numel() == 0) return {made.sums.zero_(), made.weight.zero_(), made.bias.zero_()};
    a.input = const_bytes(x);
    a.grad_output = const_bytes(dy);
    a.mean = const_bytes(m);
    a.inv_std = const_bytes(r);
    a.bitmask = const_bytes(mask);
    a.sums = bytes_to_write(made.sums);
    if (has_value(weight)) {
      a.grad_weight = bytes_to_write(made.weight);
      a.grad_bias = bytes_to_write(made.bias);
    }
    if (reduce_over_channels("reduce_bn", place, x, channels, &a, &apex_reduce_bn_prepare, &apex_reduce_bn))
      return {made.sums, made.weight, made.bias};
  }
  return call_reference<decltype(reduce_bn)>("reduce_bn", grad_output, input, mean, inv_std, weight, channel_last,
                                             bitmask);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> reduce_bn_meta(const at::Tensor& grad_output,
                                                                     const at::Tensor& input, const at::Tensor& mean,
                                                                     const at::Tensor& inv_std,
                                                                     const OptionalTensor& weight, bool channel_last,
                                                                     const OptionalTensor& bitmask) {
  const ReducedGradients made = reduced_gradients(
      input, check_reduce_bn(grad_output, input, mean, inv_std, weight, channel_last, bitmask), weight);
  return {made.sums, made.weight, made.bias};
}
}  // namespace apex

APEX_CHANNEL_OP(reduce_bn)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(reduce_bn, m) {
  m.def(
      "reduce_bn",
      [](const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inv_std,
         const std::optional<at::Tensor>& weight, bool channel_last, const std::optional<at::Tensor>& bitmask) {
        static const auto op = apex::dispatcher_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
            const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
            const std::optional<at::Tensor>&, bool, const std::optional<at::Tensor>&)>("apex::reduce_bn");
        return op.call(grad_output, input, mean, inv_std, weight, channel_last, bitmask);
      },
      pybind11::arg("grad_output"), pybind11::arg("input"), pybind11::arg("mean"), pybind11::arg("inv_std"),
      pybind11::arg("weight"), pybind11::arg("channel_last"), pybind11::arg("bitmask") = std::nullopt,
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
