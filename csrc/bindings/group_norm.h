// Group norm, with SiLU after it or without: checks, layouts, outputs, launches.
#pragma once
#include "generated/group_norm.h"
#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>

namespace apex {
namespace group_norm {
constexpr const char* name = "group_norm";

inline void check(const at::Tensor& input, int64_t groups, const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "group_norm: the input has ", input.dim(),
                    " dimensions; it must have at least 2, batch and channels");
  element_type(name, input.scalar_type());
  TORCH_CHECK_VALUE(groups >= 1, "group_norm: num_groups must be at least 1, not ", groups);
  TORCH_CHECK_VALUE(input.sym_size(1) % groups == 0, "group_norm: ", input.sym_size(1),
                    " channels cannot be parted into ", groups, " groups");
  check_affine(name, weight, bias, input, input.sym_size(1));
}

// How kernels read a tensor, and how outputs lie in memory.
enum class Layout { contiguous, channels_last_1d, channels_last, channels_last_3d };
inline Layout layout_of(const at::Tensor& input) {
  if (input.is_contiguous()) return Layout::contiguous;
  if (input.dim() == 3 && input.transpose(1, 2).is_contiguous()) return Layout::channels_last_1d;
  if (input.dim() == 4 && input.is_contiguous(at::MemoryFormat::ChannelsLast)) return Layout::channels_last;
  if (input.dim() == 5 && input.is_contiguous(at::MemoryFormat::ChannelsLast3d)) return Layout::channels_last_3d;
  return Layout::contiguous;
}
inline at::MemoryFormat format_of(Layout layout) {
  return layout == Layout::channels_last      ? at::MemoryFormat::ChannelsLast
         : layout == Layout::channels_last_3d ? at::MemoryFormat::ChannelsLast3d
                                              : at::MemoryFormat::Contiguous;
}
inline at::Tensor in_layout(const at::Tensor& tensor, Layout layout) {
  if (layout == Layout::channels_last_1d) return tensor.transpose(1, 2).contiguous().transpose(1, 2);
  return tensor.contiguous(format_of(layout));
}
inline at::Tensor empty_like(const at::Tensor& input, Layout layout) {
  if (layout == Layout::channels_last_1d)
    return at::empty_symint({input.sym_size(0), input.sym_size(2), input.sym_size(1)}, input.options()).transpose(1, 2);
  return at::empty_symint(input.sym_sizes(), input.options().memory_format(format_of(layout)));
}

inline gpu::GroupNorm arguments(const at::Tensor& x, Layout layout, int64_t groups, const at::Tensor& w,
                                const at::Tensor& b, double eps, bool silu) {
  gpu::GroupNorm a{};
  a.input = bytes(x), a.weight = bytes(w), a.bias = bytes(b);
  a.batch = x.size(0), a.channels = x.size(1), a.groups = groups;
  a.spatial = 1;
  for (int64_t d = 2; d < x.dim(); ++d) a.spatial *= x.size(d);
  a.eps = eps;
  a.input_type = element_type(name, x.scalar_type());
  a.weight_type = w.defined()   ? element_type(name, w.scalar_type())
                  : b.defined() ? element_type(name, b.scalar_type())
                                : a.input_type;
  a.channels_last = layout != Layout::contiguous || a.spatial == 1;
  a.silu = silu;
  return a;
}
}  // namespace group_norm
namespace gn = group_norm;

inline void GroupNormForward::check() const { gn::check(input, num_groups, weight, bias); }
inline GroupNormForward::Result GroupNormForward::outputs() const {
  const auto statistics = input.options().dtype(math_type(input));
  const auto make = [&] { return at::empty_symint({input.sym_size(0), num_groups}, statistics); };
  return {gn::empty_like(input, gn::layout_of(input)), make(), make()};
}
inline bool GroupNormForward::launch(const apex_place& place, Result& made) const {
  const gn::Layout layout = gn::layout_of(input);
  const at::Tensor x = gn::in_layout(input, layout), w = contiguous(weight), b = contiguous(bias);
  made = outputs();
  const auto& [output, mean, rstd] = made;
  gpu::GroupNorm a = gn::arguments(x, layout, num_groups, w, b, eps, silu);
  a.output = mutable_bytes(output), a.mean = mutable_bytes(mean), a.rstd = mutable_bytes(rstd);
  if (!run_with_workspace(&apex_group_norm_forward, place, a, unit, x.device())) return false;
  if (x.numel() == 0)
    for (const at::Tensor& statistic : {mean, rstd}) statistic.fill_(std::numeric_limits<double>::quiet_NaN());
  return true;
}

inline void GroupNormBackward::check() const {
  gn::check(input, num_groups, weight, bias);
  check_like(unit, "the gradient", grad_output, input.sym_sizes(), input.scalar_type());
  const c10::SymDimVector sizes{input.sym_size(0), num_groups};
  for (const at::Tensor* t : {&mean, &rstd})
    check_like(unit, t == &mean ? "mean" : "rstd", *t, sizes, math_type(input), "one for each image and group, ");
}
inline GroupNormBackward::Result GroupNormBackward::outputs() const {
  return {gn::empty_like(input, gn::layout_of(input)), gradient_like(weight, weight_gradients, input),
          gradient_like(bias, weight_gradients, input)};
}
inline bool GroupNormBackward::launch(const apex_place& place, Result& made) const {
  const gn::Layout layout = gn::layout_of(input);
  const at::Tensor x = gn::in_layout(input, layout), dy = gn::in_layout(grad_output, layout), w = contiguous(weight),
                   b = contiguous(bias), m = mean.contiguous(), r = rstd.contiguous();
  made = outputs();
  const auto& [grad_input, grad_weight, grad_bias] = made;
  gpu::GroupNorm a = gn::arguments(x, layout, num_groups, w, b, eps, silu);
  a.grad_output = bytes(dy), a.output = mutable_bytes(grad_input);
  a.mean = const_cast<gpu::u8*>(bytes(m)), a.rstd = const_cast<gpu::u8*>(bytes(r));  // the backward reads them
  if (w.defined() && weight_gradients) a.grad_weight = mutable_bytes(grad_weight);
  if (b.defined() && weight_gradients) a.grad_bias = mutable_bytes(grad_bias);
  if (!run_with_workspace(&apex_group_norm_backward, place, a, unit, x.device())) return false;
  if (x.numel() == 0) grad_weight.zero_(), grad_bias.zero_();
  return true;
}
inline GroupNormBackward::Result GroupNormBackward::formula() const {
  const at::ScalarType math = math_type(input);
  const c10::SymInt batch = input.sym_size(0), channels = input.sym_size(1);
  const c10::SymInt spatial = c10::multiply_integers(input.sym_sizes().slice(2));
  const std::vector<c10::SymInt> shape{batch, num_groups, channels / num_groups, spatial};
  const auto of_channels = [&](const OptionalTensor& w) {
    return w->to(math).reshape_symint({1, num_groups, channels / num_groups, 1});
  };
  const at::Tensor x = input.to(math).reshape_symint(shape);
  at::Tensor g = grad_output.to(math).reshape_symint(shape);
  const std::vector<int64_t> over{2, 3};
  const at::Tensor centred = x - x.mean(over, true), rstd = (centred * centred).mean(over, true).add(eps).rsqrt(),
                   normalized = centred * rstd;
  if (silu) {
    at::Tensor z = has_value(weight) ? normalized * of_channels(weight) : normalized;
    if (has_value(bias)) z = z + of_channels(bias);
    const at::Tensor s = at::sigmoid(z);
    g = g * s * (z * (1 - s) + 1);
  }
  const at::Tensor gw = has_value(weight) ? g * of_channels(weight) : g;
  const at::Tensor grad = (gw - gw.mean(over, true) - normalized * (gw * normalized).mean(over, true)) * rstd;
  const auto of_weight = [&](const at::Tensor& t, const OptionalTensor& w) {
    if (!has_value(w) || !weight_gradients) return no_elements(input);
    return t.sum(std::vector<int64_t>{0, 3}).reshape_symint({channels}).to(w->scalar_type());
  };
  return {grad.reshape_symint(input.sym_sizes()).to(input.scalar_type()), of_weight(g * normalized, weight),
          of_weight(g, bias)};
}
}  // namespace apex
