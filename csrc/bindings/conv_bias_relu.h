// A convolution of torch's (cuDNN, MIOpen, the CPU's), and behind it one pass of ours: scale, bias, addition and ReLU
// of each element; in the backward the ReLU's mask, the scale and the gradient of the bias.
#pragma once
#include "generated/conv_bias_relu.h"
#include "channel.h"

#include <ATen/Context.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/cudnn_convolution_relu.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/threshold_backward.h>

namespace apex {
namespace conv {
inline bool is_channels_last(const at::Tensor& tensor) {
  return tensor.is_contiguous(at::MemoryFormat::ChannelsLast) && !tensor.is_contiguous();
}
// What a convolution reads and writes: channels last where the input or the weight is, as torch's.
inline at::MemoryFormat format_of(const at::Tensor& input, const at::Tensor& weight) {
  return is_channels_last(input) || is_channels_last(weight) ? at::MemoryFormat::ChannelsLast
                                                             : at::MemoryFormat::Contiguous;
}

template <class Call> void check(const Call& c) {
  const char* op = c.unit;
  const at::Tensor &input = c.input, &weight = c.weight;
  element_type(op, input.scalar_type());
  TORCH_CHECK_VALUE(input.dim() == 4 && weight.dim() == 4 && input.sym_size(1) == weight.sym_size(1), op,
                    ": input [batch, channels, height, width] and weight [outputs, channels, height, width] do not "
                    "fit (there are no groups): ",
                    input.sym_sizes(), " and ", weight.sym_sizes());
  TORCH_CHECK_TYPE(weight.scalar_type() == input.scalar_type(), op, ": the input is ", input.scalar_type(),
                   ", the weight ", weight.scalar_type());
  TORCH_CHECK_VALUE(c.stride >= 1 && c.padding >= 0, op, ": stride must be at least 1 and padding 0, not ", c.stride,
                    " and ", c.padding);
  for (int64_t d = 0; d < 4; ++d)
    TORCH_CHECK_VALUE(weight.sym_size(d) >= 1, op, ": the weight, ", weight.sym_sizes(), ", has no elements");
  for (int64_t d = 2; d < 4; ++d)
    TORCH_CHECK_VALUE(input.sym_size(d) + 2 * c.padding >= weight.sym_size(d), op, ": the weight, ", weight.sym_sizes(),
                      ", is larger than the input, ", input.sym_sizes(), ", with a padding of ", c.padding);
  for (const auto& [name, tensor] : {std::pair{"scale", &c.scale}, std::pair{"bias", &c.bias}}) {
    if (!has_value(*tensor)) continue;
    TORCH_CHECK_VALUE((*tensor)->dim() == 1 && (*tensor)->sym_size(0) == weight.sym_size(0), op, ": ", name,
                      " has shape ", (*tensor)->sym_sizes(), " but the weight ", weight.sym_size(0), " outputs");
    check_math(op, name, **tensor, input);
  }
  TORCH_CHECK_TYPE(!has_value(c.scale) || !has_value(c.bias) || c.scale->scalar_type() == c.bias->scalar_type(), op,
                   ": scale and bias must have one dtype");
}
template <class Call> std::vector<c10::SymInt> output_sizes(const Call& c) {
  std::vector<c10::SymInt> sizes{c.input.sym_size(0), c.weight.sym_size(0)};
  for (int64_t d = 2; d < 4; ++d)
    sizes.push_back((c.input.sym_size(d) + 2 * c.padding - c.weight.sym_size(d)) / c.stride + 1);
  return sizes;
}
inline at::Tensor empty_like(const at::Tensor& tensor, at::MemoryFormat format) {
  return at::empty_symint(tensor.sym_sizes(), tensor.options().memory_format(format));
}
inline at::Tensor over_channels(const at::Tensor& numbers) { return numbers.view_symint({1, -1, 1, 1}); }
inline Channels channels_of(const at::Tensor& tensor, at::MemoryFormat format) {
  return {tensor.sym_size(1), format, format == at::MemoryFormat::ChannelsLast, math_type(tensor)};
}

// Where cuDNN's convolution that adds a bias and takes the ReLU by itself is faster than a pass behind it: measured on
// an H200, benchmarks/conv_bias_relu.py (3x3 524 us beside 551, 1x1 120 beside 130), with channels of whole vectors.
struct FusedByCudnn {
  at::ScalarType dtype;
  at::MemoryFormat format;
};
constexpr FusedByCudnn fused_by_cudnn[] = {{at::kHalf, at::MemoryFormat::ChannelsLast}};
inline bool is_fused(const apex_place& place, const ConvBiasReluForward& c, at::MemoryFormat format) {
  if (place.platform != APEX_CUDA || !c.relu || has_value(c.scale) || has_value(c.residual) || !has_value(c.bias) ||
      c.bias->scalar_type() != c.input.scalar_type() || c.input.numel() == 0 || c.weight.size(0) % 8 != 0 ||
      c.weight.size(1) % 8 != 0 || !at::globalContext().userEnabledCuDNN())
    return false;
  for (const FusedByCudnn& known : fused_by_cudnn)
    if (known.dtype == c.input.scalar_type() && known.format == format) return true;
  return false;
}

// Writes x * scale + bias + residual, or its ReLU, to `made`, which may be x. False: the reference must run.
inline bool finish(const apex_place& place, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& bias,
                   const at::Tensor& residual, at::MemoryFormat format, bool relu, const at::Tensor& made,
                   const char* op) {
  gpu::ChannelApply a{};
  set_shape(op, x, channels_of(x, format), scale.defined() ? scale : bias, &a);
  a.input = bytes(x), a.output = mutable_bytes(made);
  a.weight = bytes(scale), a.shift = bytes(bias), a.z = bytes(residual), a.relu = relu;
  return !use_reference(apex_batchnorm_forward(&place, &a), op);
}
// The sums of a gradient's channels, one read of it. False: the reference must run.
inline bool sum_channels(const apex_place& place, const at::Tensor& g, at::MemoryFormat format,
                         const at::Tensor& of_bias, const char* op) {
  const Channels channels = channels_of(g, format);
  if (g.numel() == 0) return of_bias.zero_(), true;
  const auto options = g.options().dtype(channels.math).memory_format(at::MemoryFormat::Contiguous);
  const at::Tensor sums = at::empty({2 * of_bias.numel()}, options), zeros = at::zeros({of_bias.numel()}, options),
                   unused = at::empty_like(of_bias);
  gpu::ChannelReduce a{};
  set_shape(op, g, channels, of_bias, &a);
  a.input = a.grad_output = bytes(g), a.mean = a.inv_std = bytes(zeros), a.sums = mutable_bytes(sums);
  a.grad_weight = mutable_bytes(unused), a.grad_bias = mutable_bytes(of_bias);
  return run_with_workspace(&apex_reduce_bn, place, a, op, g.device());
}
// What reaches a convolution from behind its ReLU, channels last, with the bias's gradient summed on the way.
struct Masked {
  at::Tensor scaled, unscaled, of_bias;

  bool run(const apex_place& place, const at::Tensor& g, const at::Tensor& y, const at::Tensor& scale, const char* op) {
    gpu::BiasActivation a{};
    a.input = bytes(y), a.grad_output = bytes(g), a.output = mutable_bytes(scaled),
    a.unscaled = mutable_bytes(unscaled);
    a.hidden = y.size(1), a.rows = a.hidden ? y.numel() / a.hidden : 0;
    a.function = gpu::function_relu;
    a.type = element_type(op, y.scalar_type());
    a.scale = bytes(scale), a.grad_bias = mutable_bytes(of_bias);
    a.bias_type = scale.defined() || of_bias.defined()
                      ? element_type(op, (scale.defined() ? scale : of_bias).scalar_type())
                      : a.type;
    return run_with_workspace(&apex_bias_activation_backward, place, a, op, y.device());
  }
};
}  // namespace conv

inline void ConvBiasReluForward::check() const {
  conv::check(*this);
  const auto sizes = conv::output_sizes(*this);
  check_like(unit, "residual", residual, sizes, input.scalar_type(), "the output's ");
  if (!has_value(mask)) return;
  TORCH_CHECK_VALUE(relu, unit, ": a mask goes with a ReLU");
  check_like(unit, "mask", mask, sizes, std::nullopt, "the output's ");
}
inline at::Tensor ConvBiasReluForward::outputs() const {
  return at::empty_symint(conv::output_sizes(*this), input.options().memory_format(conv::format_of(input, weight)));
}
inline bool ConvBiasReluForward::launch(const apex_place& place, Result& made) const {
  const at::MemoryFormat format = conv::format_of(input, weight);
  if (conv::is_fused(place, *this, format)) {
    made = at::cudnn_convolution_relu(input.contiguous(format), weight.contiguous(format), bias->contiguous(),
                                      {stride, stride}, {padding, padding}, {1, 1}, 1)
               .contiguous(format);
    if (has_value(mask)) made.masked_fill_(mask->eq(0), 0);
    return true;
  }
  // A CPU's convolution adds the bias before it rounds, those of GPUs behind it.
  OptionalTensor added;
  if (place.platform == APEX_CPU && has_value(bias) && !has_value(scale)) added = bias->to(input.scalar_type());
  const at::Tensor more = contiguous(residual, format), s = contiguous(scale),
                   b = added ? at::Tensor() : contiguous(bias);
  made = at::convolution(input.contiguous(format), weight.contiguous(format), added, {stride, stride},
                         {padding, padding}, {1, 1}, false, {0, 0}, 1)
             .contiguous(format);
  if ((s.defined() || b.defined() || more.defined() || relu) &&
      !conv::finish(place, made, s, b, more, format, relu, made, unit))
    return false;
  if (has_value(mask)) made.masked_fill_(mask->eq(0), 0);
  return true;
}

inline void ConvBiasReluBackward::check() const {
  conv::check(*this);
  const auto sizes = conv::output_sizes(*this);
  check_like(unit, "the gradient", grad_output, sizes, input.scalar_type());
  if (has_value(output)) check_like(unit, "what the forward kept", *output, sizes, input.scalar_type());
}
inline ConvBiasReluBackward::Result ConvBiasReluBackward::outputs() const {
  const at::MemoryFormat format = conv::format_of(input, weight);
  return {of_input ? conv::empty_like(input, format) : no_elements(input),
          of_weight ? conv::empty_like(weight, format) : no_elements(input),
          of_bias && has_value(bias) ? at::empty_symint(bias->sym_sizes(), bias->options()) : no_elements(input),
          of_residual ? conv::empty_like(grad_output, format) : no_elements(input)};
}
inline bool ConvBiasReluBackward::launch(const apex_place& place, Result& made) const {
  const at::MemoryFormat format = conv::format_of(input, weight);
  const bool convolves = of_input || of_weight, sums = of_bias && has_value(bias), relu = has_value(output);
  const at::Tensor y = contiguous(output, format), s = convolves ? contiguous(scale) : at::Tensor();
  at::Tensor g = grad_output.contiguous(format), of_b = no_elements(input), of_r = no_elements(input);
  if (relu && format == at::MemoryFormat::ChannelsLast) {
    conv::Masked masked{at::empty_like(y), of_residual && s.defined() ? at::empty_like(y) : at::Tensor(),
                        sums ? at::empty_like(*bias, at::MemoryFormat::Contiguous) : at::Tensor()};
    if (!masked.run(place, g, y, s, unit)) return false;
    g = masked.scaled;
    if (sums) of_b = masked.of_bias;
    if (of_residual) of_r = s.defined() ? masked.unscaled : g;
  } else {
    if (relu) g = at::threshold_backward(g, y, 0);
    if (sums) {
      of_b = at::empty_like(*bias, at::MemoryFormat::Contiguous);
      if (!conv::sum_channels(place, g, format, of_b, unit)) return false;
    }
    if (of_residual) of_r = relu ? g : g.clone();
    if (s.defined()) {
      const at::Tensor scaled = at::empty_like(g);
      if (!conv::finish(place, g, s, {}, {}, format, false, scaled, unit)) return false;
      g = scaled;
    }
  }
  made = {no_elements(input), no_elements(input), of_b, of_r};
  if (!convolves) return true;
  const auto found =
      at::convolution_backward(g, input.contiguous(format), weight.contiguous(format), std::nullopt, {stride, stride},
                               {padding, padding}, {1, 1}, false, {0, 0}, 1, {of_input, of_weight, false});
  if (of_input) std::get<0>(made) = std::get<0>(found).contiguous(format);
  if (of_weight) std::get<1>(made) = std::get<1>(found).contiguous(format);
  return true;
}
inline ConvBiasReluBackward::Result ConvBiasReluBackward::formula() const {
  at::Tensor g = grad_output;
  if (has_value(output)) g = g * (*output > 0).to(g.scalar_type());
  Result made{no_elements(input), no_elements(input), no_elements(input), no_elements(input)};
  if (of_bias && has_value(bias)) std::get<2>(made) = g.sum(at::IntArrayRef{0, 2, 3}).to(bias->scalar_type());
  if (of_residual) std::get<3>(made) = g;
  if (!of_input && !of_weight) return made;
  if (has_value(scale)) g = (g * conv::over_channels(*scale)).to(input.scalar_type());
  const auto found = at::convolution_backward(g, input, weight, std::nullopt, {stride, stride}, {padding, padding},
                                              {1, 1}, false, {0, 0}, 1, {of_input, of_weight, false});
  if (of_input) std::get<0>(made) = std::get<0>(found);
  if (of_weight) std::get<1>(made) = std::get<1>(found);
  return made;
}
}  // namespace apex
