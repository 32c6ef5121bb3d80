#pragma once
#include "batchnorm.h"
#include "host/relu_bw.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
inline at::Tensor relu_bw(const at::Tensor& grad_output, const at::Tensor& input, const OptionalTensor& z,
                          const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight,
                          const OptionalTensor& shift, bool channel_last) {
  const Channels channels = check_batchnorm_forward("relu_bw", input, z, mean, inv_std, weight, shift, channel_last);
  check_gradient("relu_bw", grad_output, input);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const ChannelApplyTensors tensors(channels, input, grad_output, z, mean, inv_std, weight, shift);
    const gpu::ChannelApply a = tensors.arguments("relu_bw", channels);
    if (!use_reference(apex_relu_bw(&place, &a), "relu_bw")) return tensors.output;
  }
  return call_reference<decltype(relu_bw)>("relu_bw", grad_output, input, z, mean, inv_std, weight, shift,
                                           channel_last);
}
inline at::Tensor relu_bw_meta(const at::Tensor& grad_output, const at::Tensor& input, const OptionalTensor& z,
                               const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight,
                               const OptionalTensor& shift, bool channel_last) {
  const Channels channels = check_batchnorm_forward("relu_bw", input, z, mean, inv_std, weight, shift, channel_last);
  check_gradient("relu_bw", grad_output, input);
  return output_like(input, channels);
}
}  // namespace apex

APEX_CHANNEL_OP(relu_bw)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(relu_bw, m) {
  using Optional = std::optional<at::Tensor>;
  m.def(
      "relu_bw",
      [](const at::Tensor& grad_output, const at::Tensor& input, const Optional& z, const at::Tensor& mean,
         const at::Tensor& inv_std, const Optional& weight, const Optional& shift, bool channel_last) {
        static const auto op =
            apex::dispatcher_op<at::Tensor(const at::Tensor&, const at::Tensor&, const Optional&, const at::Tensor&,
                                           const at::Tensor&, const Optional&, const Optional&, bool)>("apex::relu_bw");
        return op.call(grad_output, input, z, mean, inv_std, weight, shift, channel_last);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
