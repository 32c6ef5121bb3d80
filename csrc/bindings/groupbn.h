// Batch norm of NHWC tensors with an addition and a ReLU in the same pass, whose mask is kept as bits.
#pragma once
#include "batchnorm.h"
#include "host/groupbn.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
namespace group_batch_norm {
inline at::Tensor mask_of(const at::Tensor& input, bool wanted) {
  return at::empty_symint({wanted ? bitmask_bytes(input) : c10::SymInt(0)}, input.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
}
inline Channels check_forward(const at::Tensor& input, const OptionalTensor& z, const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight, const OptionalTensor& shift, bool fuse_relu, bool make_bitmask, bool channel_last) {
  const Channels channels = nhwc_channels_of("groupbn_forward", input, channel_last);
  check_normalization("groupbn_forward", input, channels, z, mean, inv_std, weight, shift);
  TORCH_CHECK_VALUE(fuse_relu || !make_bitmask, "groupbn_forward: a bitmask says what a ReLU let through: make_bitmask needs fuse_relu");
  return channels;
}
inline Channels check_backward(const at::Tensor& grad_output, const at::Tensor& input, const OptionalTensor& bitmask, const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight, const OptionalTensor& sum_dy, const OptionalTensor& sum_dy_xmu, const OptionalTensor& count, bool channel_last) {
  const char* op = "groupbn_backward";
  const Channels channels = nhwc_channels_of(op, input, channel_last);
  check_normalization(op, input, channels, std::nullopt, mean, inv_std, weight, std::nullopt);
  check_like_input(op, "grad_output", grad_output, input);
  check_bitmask(op, bitmask, input);
  check_gradient_sums(op, input, channels, sum_dy, sum_dy_xmu, count);
  return channels;
}
inline at::Tensor gradient_of_z(const at::Tensor& input, const Channels& channels, bool wanted) {
  return wanted ? output_like(input, channels) : at::empty({0}, input.options().memory_format(at::MemoryFormat::Contiguous));
}
}  // namespace group_batch_norm

inline std::tuple<at::Tensor, at::Tensor> groupbn_forward(const at::Tensor& input, const OptionalTensor& z, const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight, const OptionalTensor& shift, bool fuse_relu, bool make_bitmask, bool channel_last) {
  namespace gbn = group_batch_norm;
  const Channels channels = gbn::check_forward(input, z, mean, inv_std, weight, shift, fuse_relu, make_bitmask, channel_last);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const ChannelApplyTensors tensors(channels, input, std::nullopt, z, mean, inv_std, weight, shift);
    const at::Tensor bitmask = gbn::mask_of(input, make_bitmask);
    gpu::ChannelApply a = tensors.arguments("groupbn_forward", channels);
    a.relu = fuse_relu;
    if (make_bitmask) a.bitmask = bytes_to_write(bitmask);
    if (!use_reference(apex_groupbn_forward(&place, &a), "groupbn_forward")) return {tensors.output, bitmask};
  }
  return call_reference<decltype(groupbn_forward)>("groupbn_forward", input, z, mean, inv_std, weight, shift, fuse_relu, make_bitmask, channel_last);
}
inline std::tuple<at::Tensor, at::Tensor> groupbn_forward_meta(const at::Tensor& input, const OptionalTensor& z, const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight, const OptionalTensor& shift, bool fuse_relu, bool make_bitmask, bool channel_last) {
  namespace gbn = group_batch_norm;
  const Channels channels = gbn::check_forward(input, z, mean, inv_std, weight, shift, fuse_relu, make_bitmask, channel_last);
  return {output_like(input, channels), gbn::mask_of(input, make_bitmask)};
}

inline std::tuple<at::Tensor, at::Tensor> groupbn_backward(const at::Tensor& grad_output, const at::Tensor& input, const OptionalTensor& bitmask, const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight, const OptionalTensor& sum_dy, const OptionalTensor& sum_dy_xmu, const OptionalTensor& count, bool of_z, bool channel_last) {
  namespace gbn = group_batch_norm;
  const Channels channels = gbn::check_backward(grad_output, input, bitmask, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const ChannelApplyTensors tensors(channels, input, grad_output, std::nullopt, mean, inv_std, weight, std::nullopt);
    const GradientSums sums(sum_dy, sum_dy_xmu, count);
    const at::Tensor mask = in_format(bitmask, at::MemoryFormat::Contiguous), grad_z = gbn::gradient_of_z(input, channels, of_z);
    gpu::ChannelApply a = tensors.arguments("groupbn_backward", channels);
    sums.set(&a);
    a.bitmask = const_cast<gpu::u8*>(const_bytes(mask));  // read alone
    if (of_z) a.grad_z = bytes_to_write(grad_z);
    if (!use_reference(apex_groupbn_backward(&place, &a), "groupbn_backward")) return {tensors.output, grad_z};
  }
  return call_reference<decltype(groupbn_backward)>("groupbn_backward", grad_output, input, bitmask, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, of_z, channel_last);
}
inline std::tuple<at::Tensor, at::Tensor> groupbn_backward_meta(const at::Tensor& grad_output, const at::Tensor& input, const OptionalTensor& bitmask, const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight, const OptionalTensor& sum_dy, const OptionalTensor& sum_dy_xmu, const OptionalTensor& count, bool of_z, bool channel_last) {
  namespace gbn = group_batch_norm;
  const Channels channels = gbn::check_backward(grad_output, input, bitmask, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last);
  return {output_like(input, channels), gbn::gradient_of_z(input, channels, of_z)};
}
}  // namespace apex

APEX_CHANNEL_OP(groupbn_forward)
APEX_CHANNEL_OP(groupbn_backward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(groupbn, m) {
  using Optional = std::optional<at::Tensor>;
  using Two = std::tuple<at::Tensor, at::Tensor>;
  m.def(
      "groupbn_forward",
      [](const at::Tensor& input, const Optional& z, const at::Tensor& mean, const at::Tensor& inv_std, const Optional& weight, const Optional& shift, bool fuse_relu, bool make_bitmask, bool channel_last) {
        static const auto op = apex::dispatcher_op<Two(const at::Tensor&, const Optional&, const at::Tensor&, const at::Tensor&, const Optional&, const Optional&, bool, bool, bool)>("apex::groupbn_forward");
        return op.call(input, z, mean, inv_std, weight, shift, fuse_relu, make_bitmask, channel_last);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def(
      "groupbn_backward",
      [](const at::Tensor& grad_output, const at::Tensor& input, const Optional& bitmask, const at::Tensor& mean, const at::Tensor& inv_std, const Optional& weight, const Optional& sum_dy, const Optional& sum_dy_xmu, const Optional& count, bool of_z, bool channel_last) {
        static const auto op = apex::dispatcher_op<Two(const at::Tensor&, const at::Tensor&, const Optional&, const at::Tensor&, const at::Tensor&, const Optional&, const Optional&, const Optional&, const Optional&, bool, bool)>("apex::groupbn_backward");
        return op.call(grad_output, input, bitmask, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, of_z, channel_last);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
