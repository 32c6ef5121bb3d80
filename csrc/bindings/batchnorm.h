#pragma once
#include "channel.h"
#include "host/batchnorm.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
inline void check_normalization(const char* op, const at::Tensor& input, const Channels& channels,
                                const OptionalTensor& z, const at::Tensor& mean, const at::Tensor& inv_std,
                                const OptionalTensor& weight, const OptionalTensor& shift) {
  check_given(op, "mean", mean);
  check_given(op, "inv_std", inv_std);
  check_like_input(op, "z", z, input);
  check_statistic(op, "mean", mean, input, channels);
  check_statistic(op, "inv_std", inv_std, input, channels);
  check_affine(op, weight, shift, input, channels);
}
inline Channels check_batchnorm_forward(const char* op, const at::Tensor& input, const OptionalTensor& z,
                                        const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight,
                                        const OptionalTensor& shift, bool channel_last) {
  const Channels channels = channels_of(op, input, channel_last);
  check_normalization(op, input, channels, z, mean, inv_std, weight, shift);
  return channels;
}

// The tensors of a pass in the layout that kernels read, held while the launch is queued.
struct ChannelApplyTensors {
  at::Tensor input, grad_output, z, mean, inv_std, weight, shift, output;

  ChannelApplyTensors(const Channels& channels, const at::Tensor& x, const OptionalTensor& dy,
                      const OptionalTensor& more, const at::Tensor& m, const at::Tensor& r, const OptionalTensor& w,
                      const OptionalTensor& s)
      : input(x.contiguous(channels.format)), grad_output(in_format(dy, channels.format)),
        z(in_format(more, channels.format)), mean(m.contiguous()), inv_std(r.contiguous()),
        weight(in_format(w, at::MemoryFormat::Contiguous)), shift(in_format(s, at::MemoryFormat::Contiguous)),
        output(output_like(x, channels)) {}

  gpu::ChannelApply arguments(const char* op, const Channels& channels) const {
    gpu::ChannelApply a{};
    set_shape(op, input, channels, weight.defined() ? weight : shift, &a);
    a.input = const_bytes(input);
    a.grad_output = const_bytes(grad_output);
    a.z = const_bytes(z);
    a.mean = const_bytes(mean);
    a.inv_std = const_bytes(inv_std);
    a.weight = const_bytes(weight);
    a.shift = const_bytes(shift);
    a.output = bytes_to_write(output);
    return a;
  }
};

// ---- batchnorm_forward ----
inline at::Tensor batchnorm_forward(const at::Tensor& input, const OptionalTensor& z, const at::Tensor& mean,
                                    const at::Tensor& inv_std, const OptionalTensor& weight,
                                    const OptionalTensor& shift, bool fuse_relu, bool channel_last) {
  const Channels channels =
      check_batchnorm_forward("batchnorm_forward", input, z, mean, inv_std, weight, shift, channel_last);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const ChannelApplyTensors tensors(channels, input, std::nullopt, z, mean, inv_std, weight, shift);
    gpu::ChannelApply a = tensors.arguments("batchnorm_forward", channels);
    a.relu = fuse_relu;
    if (!use_reference(apex_batchnorm_forward(&place, &a), "batchnorm_forward")) return tensors.output;
  }
  return call_reference<decltype(batchnorm_forward)>("batchnorm_forward", input, z, mean, inv_std, weight, shift,
                                                     fuse_relu, channel_last);
}
inline at::Tensor batchnorm_forward_meta(const at::Tensor& input, const OptionalTensor& z, const at::Tensor& mean,
                                         const at::Tensor& inv_std, const OptionalTensor& weight,
                                         const OptionalTensor& shift, bool, bool channel_last) {
  return output_like(
      input, check_batchnorm_forward("batchnorm_forward", input, z, mean, inv_std, weight, shift, channel_last));
}

// ---- batchnorm_backward ----
inline void check_gradient_sums(const char* op, const at::Tensor& input, const Channels& channels,
                                const OptionalTensor& sum_dy, const OptionalTensor& sum_dy_xmu,
                                const OptionalTensor& count) {
  check_statistic(op, "sum_dy", sum_dy, input, channels);
  check_statistic(op, "sum_dy_xmu", sum_dy_xmu, input, channels);
  TORCH_CHECK_VALUE(has_value(sum_dy) == has_value(sum_dy_xmu) && has_value(sum_dy) == has_value(count), op,
                    ": sum_dy, sum_dy_xmu and count come together, or not at all");
  if (has_value(count)) {
    TORCH_CHECK_TYPE(count->scalar_type() == at::kInt || count->scalar_type() == channels.math, op,
                     ": count must be int32 or ", channels.math, ", not ", count->scalar_type());
    TORCH_CHECK_VALUE(count->device() == input.device(), op, ": count is on ", count->device(), " but the input is on ",
                      input.device());
  }
}
// Sums over a channel's elements as kernels take them, held while the launch is queued.
struct GradientSums {
  at::Tensor of_dy, of_dy_xmu, count;

  GradientSums(const OptionalTensor& sum_dy, const OptionalTensor& sum_dy_xmu, const OptionalTensor& counts)
      : of_dy(in_format(sum_dy, at::MemoryFormat::Contiguous)),
        of_dy_xmu(in_format(sum_dy_xmu, at::MemoryFormat::Contiguous)),
        count(in_format(counts, at::MemoryFormat::Contiguous)) {}
  void set(gpu::ChannelApply* a) const {
    a->sum_dy = const_bytes(of_dy);
    a->sum_dy_xmu = const_bytes(of_dy_xmu);
    a->count = const_bytes(count);
    a->counts = count.defined() ? int32_t(count.numel()) : 0;
    a->count_is_int = count.defined() && count.scalar_type() == at::kInt;
  }
};
inline Channels check_batchnorm_backward(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean,
                                         const at::Tensor& inv_std, const OptionalTensor& weight,
                                         const OptionalTensor& sum_dy, const OptionalTensor& sum_dy_xmu,
                                         const OptionalTensor& count, bool channel_last) {
  const char* op = "batchnorm_backward";
  const Channels channels =
      check_batchnorm_forward(op, input, std::nullopt, mean, inv_std, weight, std::nullopt, channel_last);
  check_gradient(op, grad_output, input);
  check_gradient_sums(op, input, channels, sum_dy, sum_dy_xmu, count);
  return channels;
}
inline at::Tensor batchnorm_backward(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean,
                                     const at::Tensor& inv_std, const OptionalTensor& weight,
                                     const OptionalTensor& sum_dy, const OptionalTensor& sum_dy_xmu,
                                     const OptionalTensor& count, bool channel_last) {
  const Channels channels =
      check_batchnorm_backward(grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const ChannelApplyTensors tensors(channels, input, grad_output, std::nullopt, mean, inv_std, weight, std::nullopt);
    const GradientSums sums(sum_dy, sum_dy_xmu, count);
    gpu::ChannelApply a = tensors.arguments("batchnorm_backward", channels);
    sums.set(&a);
    if (!use_reference(apex_batchnorm_backward(&place, &a), "batchnorm_backward")) return tensors.output;
  }
  return call_reference<decltype(batchnorm_backward)>("batchnorm_backward", grad_output, input, mean, inv_std, weight,
                                                      sum_dy, sum_dy_xmu, count, channel_last);
}
inline at::Tensor batchnorm_backward_meta(const at::Tensor& grad_output, const at::Tensor& input,
                                          const at::Tensor& mean, const at::Tensor& inv_std,
                                          const OptionalTensor& weight, const OptionalTensor& sum_dy,
                                          const OptionalTensor& sum_dy_xmu, const OptionalTensor& count,
                                          bool channel_last) {
  return output_like(input, check_batchnorm_backward(grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu,
                                                     count, channel_last));
}
}  // namespace apex

APEX_CHANNEL_OP(batchnorm_forward)
APEX_CHANNEL_OP(batchnorm_backward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(batchnorm, m) {
  using Optional = std::optional<at::Tensor>;
  m.def(
      "batchnorm_forward",
      [](const at::Tensor& input, const Optional& z, const at::Tensor& mean, const at::Tensor& inv_std,
         const Optional& weight, const Optional& shift, bool fuse_relu, bool channel_last) {
        static const auto op =
            apex::dispatcher_op<at::Tensor(const at::Tensor&, const Optional&, const at::Tensor&, const at::Tensor&,
                                           const Optional&, const Optional&, bool, bool)>("apex::batchnorm_forward");
        return op.call(input, z, mean, inv_std, weight, shift, fuse_relu, channel_last);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def(
      "batchnorm_backward",
      [](const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& inv_std,
         const Optional& weight, const Optional& sum_dy, const Optional& sum_dy_xmu, const Optional& count,
         bool channel_last) {
        static const auto op =
            apex::dispatcher_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                           const Optional&, const Optional&, const Optional&, const Optional&, bool)>(
                "apex::batchnorm_backward");
        return op.call(grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
