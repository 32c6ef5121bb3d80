#pragma once
#include "generated/bias_activation.h"
#include "checks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>

namespace apex {
namespace activation {
// f(x), as csrc/device/bias_activation.h has it.
struct Function {
  double slope, cubic;
  int32_t kind = gpu::function_x_sigmoid;
};
inline Function function_of(c10::string_view name) {
  if (name == "silu") return {1.0, 0.0};
  if (name == "quick_gelu") return {gpu::quick_gelu_slope, 0.0};
  if (name == "gelu") return {gpu::gelu_slope, gpu::gelu_cubic};
  if (name == "squared_relu") return {0.0, 0.0, gpu::function_squared_relu};
  if (name == "relu") return {0.0, 0.0, gpu::function_relu};
  if (name == "sigmoid") return {1.0, 0.0, gpu::function_sigmoid};
  TORCH_CHECK_VALUE(false,
                    "bias_activation: the activation must be silu, gelu, quick_gelu, relu, squared_relu or sigmoid, "
                    "not '",
                    name, "'");
}

inline void check(const at::Tensor& input, const OptionalTensor& bias, c10::string_view name, bool gated) {
  function_of(name);
  element_type("bias_activation", input.scalar_type());
  TORCH_CHECK_VALUE(input.dim() >= 1, "bias_activation: the input must have at least one dimension");
  const c10::SymInt columns = input.sym_size(-1);
  TORCH_CHECK_VALUE(!gated || columns % 2 == 0,
                    "bias_activation: a gated activation halves the last dimension, which is ", columns);
  if (has_value(bias)) {
    check_like("bias_activation", "bias", bias, c10::SymDimVector{columns}, std::nullopt, "the input's last, ");
    check_math("bias_activation", "bias", *bias, input);
  }
}
inline std::vector<c10::SymInt> output_sizes(const at::Tensor& input, bool gated) {
  auto sizes = input.sym_sizes().vec();
  if (gated) sizes.back() = sizes.back() / 2;
  return sizes;
}
inline gpu::BiasActivation arguments_of(const at::Tensor& input, const at::Tensor& bias, const Function& f,
                                        bool gated) {
  gpu::BiasActivation a{};
  a.input = bytes(input), a.bias = bytes(bias);
  a.hidden = input.size(-1) / (gated ? 2 : 1);
  a.rows = input.size(-1) ? input.numel() / input.size(-1) : 0;
  a.slope = f.slope, a.cubic = f.cubic, a.function = f.kind, a.gated = gated;
  a.type = element_type("bias_activation", input.scalar_type());
  a.bias_type = bias.defined() ? element_type("bias_activation", bias.scalar_type()) : a.type;
  return a;
}
// f(x) and f'(x) by torch's ops, differentiable, in the dtype of x, as the reference has them. Far from 0 the sigmoid
// is held where exp stays in range.
inline std::pair<at::Tensor, at::Tensor> value_and_slope(const at::Tensor& given, const Function& f) {
  if (f.kind == gpu::function_sigmoid) {
    const at::Tensor y = at::sigmoid(given);
    return {y, y * at::sigmoid(-given)};
  }
  if (f.kind >= gpu::function_squared_relu) {
    const at::Tensor positive = at::relu(given);
    if (f.kind == gpu::function_squared_relu) return {positive * positive, positive * 2};
    return {positive, (given <= 0).logical_not().to(given.scalar_type())};
  }
  const at::ScalarType type = given.scalar_type();
  const double most = type == at::kDouble ? 700.0 : type == at::kHalf ? 11.0 : 87.0;
  const at::Tensor x = given.clamp_min(-most), near = x.clamp_max(most), square = near * near;
  const at::Tensor e = (-(near * (square * f.cubic + f.slope)).clamp(-most, most)).exp(), s = 1 / (1 + e);
  return {x * s, s + near * s * (e * s) * (square * (3 * f.cubic) + f.slope)};
}
}  // namespace activation
namespace act = activation;

inline void BiasActivationForward::check() const { act::check(input, bias, activation, gated); }
inline at::Tensor BiasActivationForward::outputs() const {
  return at::empty_symint(act::output_sizes(input, gated), input.options());
}
inline bool BiasActivationForward::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = input.contiguous(), b = contiguous(bias);
  made = outputs();
  gpu::BiasActivation a = act::arguments_of(x, b, act::function_of(activation), gated);
  a.output = mutable_bytes(made);
  return !use_reference(apex_bias_activation_forward(&place, &a), unit);
}

inline void BiasActivationBackward::check() const {
  act::check(input, bias, activation, gated);
  check_like(unit, "the gradient", grad_output, act::output_sizes(input, gated), input.scalar_type());
}
inline BiasActivationBackward::Result BiasActivationBackward::outputs() const {
  return {at::empty_symint(input.sym_sizes(), input.options()), gradient_like(bias, bias_gradient, input)};
}
inline bool BiasActivationBackward::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = input.contiguous(), b = contiguous(bias), g = grad_output.contiguous();
  made = outputs();
  gpu::BiasActivation a = act::arguments_of(x, b, act::function_of(activation), gated);
  a.grad_output = bytes(g), a.output = mutable_bytes(std::get<0>(made));
  if (b.defined() && bias_gradient) a.grad_bias = mutable_bytes(std::get<1>(made));
  return run_with_workspace(&apex_bias_activation_backward, place, a, unit, x.device());
}
inline BiasActivationBackward::Result BiasActivationBackward::formula() const {
  const act::Function f = act::function_of(activation);
  const at::ScalarType math = math_type(input);
  const at::Tensor u = has_value(bias) ? input.to(math) + bias->to(math) : input.to(math), g = grad_output.to(math);
  const auto halves = gated ? u.chunk(2, -1) : std::vector<at::Tensor>{u};
  const at::Tensor x = halves[0];
  const auto [y, slope] = act::value_and_slope(x, f);
  const at::Tensor du = gated ? at::cat({g * halves[1] * slope, g * y}, -1) : g * slope;
  at::Tensor db = no_elements(input);
  if (has_value(bias) && bias_gradient) db = du.reshape_symint({-1, input.sym_size(-1)}).sum(0).to(bias->scalar_type());
  return {du.to(input.scalar_type()), db};
}
}  // namespace apex
