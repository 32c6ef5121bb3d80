#pragma once
#include "functional.h"
#include "host/bias_activation.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
namespace activation {
using OptionalTensor = std::optional<at::Tensor>;

// f(x) = x * sigmoid(slope * x + cubic * x^3), or max(x, 0)^2.
struct Function {
  double slope, cubic;
  bool squared_relu;
};
inline Function function_of(c10::string_view name) {
  constexpr double gelu = 1.5957691216057308;  // 2 sqrt(2 / pi)
  if (name == "silu") return {1.0, 0.0, false};
  if (name == "quick_gelu") return {1.702, 0.0, false};
  if (name == "gelu") return {gelu, gelu * 0.044715, false};
  if (name == "squared_relu") return {0.0, 0.0, true};
  TORCH_CHECK_VALUE(false, "bias_activation: the activation must be silu, gelu, quick_gelu or squared_relu, not '",
                    name, "'");
}

// Throws unless shapes, dtypes and devices fit; returns the output's columns. Works with symbolic sizes.
inline c10::SymInt check(const at::Tensor& input, const OptionalTensor& bias, c10::string_view name, bool gated) {
  function_of(name);
  element_type("bias_activation", input.scalar_type());
  TORCH_CHECK_VALUE(input.dim() >= 1, "bias_activation: the input must have at least one dimension");
  const c10::SymInt columns = input.sym_size(-1);
  TORCH_CHECK_VALUE(!gated || columns % 2 == 0,
                    "bias_activation: a gated activation halves the last dimension, which is ", columns);
  if (has_value(bias)) {
    element_type("bias_activation", bias->scalar_type());
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == columns, "bias_activation: bias has shape ",
                      bias->sym_sizes(), " but the input ends in ", columns);
    TORCH_CHECK_VALUE(bias->device() == input.device(), "bias_activation: bias is on ", bias->device(),
                      " but the input is on ", input.device());
    TORCH_CHECK_TYPE((bias->scalar_type() == at::kDouble) == (input.scalar_type() == at::kDouble),
                     "bias_activation: float64 goes with float64 alone: the input is ", input.scalar_type(),
                     ", the bias ", bias->scalar_type());
  }
  return gated ? columns / 2 : columns;
}
inline void check_gradient(const at::Tensor& grad, const at::Tensor& input, const c10::SymInt& hidden) {
  auto sizes = input.sym_sizes().vec();
  sizes.back() = hidden;
  TORCH_CHECK_VALUE(grad.sym_sizes() == c10::SymIntArrayRef(sizes) && grad.device() == input.device(),
                    "bias_activation: the gradient has shape ", grad.sym_sizes(), " on ", grad.device(), ", not ",
                    c10::SymIntArrayRef(sizes), " on ", input.device());
  TORCH_CHECK_TYPE(grad.scalar_type() == input.scalar_type(), "bias_activation: the gradient is ", grad.scalar_type(),
                   ", not ", input.scalar_type());
}
inline at::Tensor output_of(const at::Tensor& input, const c10::SymInt& hidden) {
  auto sizes = input.sym_sizes().vec();
  sizes.back() = hidden;
  return at::empty_symint(sizes, input.options());
}
struct Gradients { at::Tensor input, bias; };
// That of a bias that is not there, or not wanted, is empty.
inline Gradients gradients_of(const at::Tensor& input, const OptionalTensor& bias, bool wanted) {
  return {at::empty_symint(input.sym_sizes(), input.options()),
          has_value(bias) && wanted ? at::empty_symint(bias->sym_sizes(), bias->options())
                                    : at::empty({0}, input.options())};
}

inline gpu::BiasActivation arguments_of(const at::Tensor& input, const at::Tensor& bias, const Function& f,
                                        bool gated) {
  gpu::BiasActivation a{};
  a.input = static_cast<const gpu::u8*>(input.const_data_ptr());
  a.bias = bias.defined() ? static_cast<const gpu::u8*>(bias.const_data_ptr()) : nullptr;
  a.hidden = input.size(-1) / (gated ? 2 : 1);
  a.rows = input.size(-1) ? input.numel() / input.size(-1) : 0;
  a.slope = f.slope;
  a.cubic = f.cubic;
  a.squared_relu = f.squared_relu;
  a.gated = gated;
  a.type = element_type("bias_activation", input.scalar_type());
  a.bias_type = bias.defined() ? element_type("bias_activation", bias.scalar_type()) : a.type;
  return a;
}
inline at::Tensor contiguous(const OptionalTensor& tensor) {
  return has_value(tensor) ? tensor->contiguous() : at::Tensor();
}

// Both: false if the reference must run.
inline bool run_forward(const at::Tensor& input, const OptionalTensor& bias, c10::string_view name, bool gated,
                        const c10::SymInt& hidden, at::Tensor* output) {
  const apex_place place = place_of(input.device());
  if (place.platform < 0) return false;
  const at::Tensor x = input.contiguous(), b = contiguous(bias);
  *output = output_of(input, hidden);
  gpu::BiasActivation a = arguments_of(x, b, function_of(name), gated);
  a.output = static_cast<gpu::u8*>(output->mutable_data_ptr());
  return !use_reference(apex_bias_activation_forward(&place, &a), "bias_activation");
}
inline bool run_backward(const at::Tensor& grad, const at::Tensor& input, const OptionalTensor& bias,
                         c10::string_view name, bool gated, bool bias_gradient, Gradients* made) {
  const apex_place place = place_of(input.device());
  if (place.platform < 0) return false;
  const at::Tensor x = input.contiguous(), b = contiguous(bias), g = grad.contiguous();
  *made = gradients_of(x, bias, bias_gradient);
  gpu::BiasActivation a = arguments_of(x, b, function_of(name), gated);
  a.grad_output = static_cast<const gpu::u8*>(g.const_data_ptr());
  a.output = static_cast<gpu::u8*>(made->input.mutable_data_ptr());
  if (b.defined() && bias_gradient) a.grad_bias = static_cast<gpu::u8*>(made->bias.mutable_data_ptr());
  if (use_reference(apex_bias_activation_prepare(&place, &a), "bias_activation")) return false;
  at::Tensor partials;
  if (a.grad_bias && a.parts > 0) {
    partials =
        at::empty({a.parts, x.size(-1)}, x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
    a.partials = static_cast<gpu::u8*>(partials.mutable_data_ptr());
  }
  return !use_reference(apex_bias_activation_backward(&place, &a), "bias_activation");
}

// The same gradients by torch's differentiable ops: what double backward differentiates.
inline Gradients differentiable_backward(const at::Tensor& grad, const at::Tensor& input, const OptionalTensor& bias,
                                         c10::string_view name, bool gated, bool bias_gradient) {
  const Function f = function_of(name);
  const at::ScalarType math = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor u = has_value(bias) ? input.to(math) + bias->to(math) : input.to(math), g = grad.to(math);
  const auto halves = gated ? u.chunk(2, -1) : std::vector<at::Tensor>{u};
  const at::Tensor x = halves[0];
  at::Tensor y, slope;
  if (f.squared_relu) {
    const at::Tensor positive = at::relu(x);
    y = positive * positive;
    slope = positive * 2;
  } else {
    const at::Tensor s = at::sigmoid(x * (x * x * f.cubic + f.slope));
    y = x * s;
    slope = s + y * (1 - s) * (x * x * (3 * f.cubic) + f.slope);
  }
  const at::Tensor du = gated ? at::cat({g * halves[1] * slope, g * y}, -1) : g * slope;
  at::Tensor db = at::empty({0}, input.options());
  if (has_value(bias) && bias_gradient) db = du.reshape_symint({-1, input.sym_size(-1)}).sum(0).to(bias->scalar_type());
  return {du.to(input.scalar_type()), db};
}

using Forward = at::Tensor(const at::Tensor&, const OptionalTensor&, c10::string_view, bool);
using Backward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                                    c10::string_view, bool, bool);

struct ActivationNode : Node {
  SavedVariable input, bias;
  std::string name_of_function;
  bool gated = false;

  variable_list apply(variable_list&& gradients) override {
    static const auto backward = dispatcher_op<Backward>("apex::bias_activation_backward");
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list found(2);
    if (!gradients[0].defined()) return found;
    const OptionalTensor b = bias.unpack();
    const auto made =
        backward.call(gradients[0], input.unpack(), b, name_of_function, gated, task_should_compute_output(1));
    if (task_should_compute_output(0)) found[0] = std::get<0>(made);
    if (task_should_compute_output(1)) found[1] = std::get<1>(made);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    input.reset_data();
    bias.reset_data();
  }
  std::string name() const override { return "ApexBiasActivationBackward"; }
};
}  // namespace activation

inline at::Tensor bias_activation_forward(const at::Tensor& input, const activation::OptionalTensor& bias,
                                          c10::string_view activation, bool gated) {
  const c10::SymInt hidden = activation::check(input, bias, activation, gated);
  at::Tensor output;
  if (activation::run_forward(input, bias, activation, gated, hidden, &output)) return output;
  return call_reference<activation::Forward>("bias_activation_forward", input, bias, activation, gated);
}
inline at::Tensor bias_activation_forward_meta(const at::Tensor& input, const activation::OptionalTensor& bias,
                                               c10::string_view activation, bool gated) {
  return activation::output_of(input, activation::check(input, bias, activation, gated));
}
inline at::Tensor bias_activation_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                                   const activation::OptionalTensor& bias, c10::string_view activation,
                                                   bool gated) {
  static const auto op = dispatcher_op<activation::Forward>("apex::bias_activation_forward");
  refuse_forward_mode_of("bias_activation", input, bias);
  NodePointer<activation::ActivationNode> node;
  if (records(input, bias)) {
    node = make_node<activation::ActivationNode>();
    torch::autograd::edge_list edges;
    edges.push_back(requires_grad(input) ? torch::autograd::impl::gradient_edge(input) : torch::autograd::Edge());
    edges.push_back(requires_grad(bias) ? torch::autograd::impl::gradient_edge(*bias) : torch::autograd::Edge());
    node->set_next_edges(std::move(edges));
    node->input = SavedVariable(input, false);
    if (has_value(bias)) node->bias = SavedVariable(*bias, false);
    node->name_of_function = std::string(activation);
    node->gated = gated;
  }
  at::Tensor output = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return op.redispatch(keys & c10::after_autograd_keyset, input, bias, activation, gated);
  }();
  if (node) torch::autograd::set_history(output, node);
  return output;
}

inline std::tuple<at::Tensor, at::Tensor> bias_activation_backward(const at::Tensor& grad_output,
                                                                   const at::Tensor& input,
                                                                   const activation::OptionalTensor& bias,
                                                                   c10::string_view activation, bool gated,
                                                                   bool bias_gradient) {
  activation::check_gradient(grad_output, input, activation::check(input, bias, activation, gated));
  activation::Gradients made;
  if (activation::run_backward(grad_output, input, bias, activation, gated, bias_gradient, &made))
    return {made.input, made.bias};
  return call_reference<activation::Backward>("bias_activation_backward", grad_output, input, bias, activation, gated,
                                              bias_gradient);
}
inline std::tuple<at::Tensor, at::Tensor> bias_activation_backward_meta(const at::Tensor& grad_output,
                                                                        const at::Tensor& input,
                                                                        const activation::OptionalTensor& bias,
                                                                        c10::string_view activation, bool gated,
                                                                        bool bias_gradient) {
  activation::check_gradient(grad_output, input, activation::check(input, bias, activation, gated));
  const activation::Gradients made = activation::gradients_of(input, bias, bias_gradient);
  return {made.input, made.bias};
}
inline std::tuple<at::Tensor, at::Tensor> bias_activation_backward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& input,
    const activation::OptionalTensor& bias, c10::string_view activation, bool gated, bool bias_gradient) {
  static const auto op = dispatcher_op<activation::Backward>("apex::bias_activation_backward");
  refuse_forward_mode_of("bias_activation", grad_output, input, bias);
  if (records(grad_output, input, bias)) {
    const activation::Gradients made =
        activation::differentiable_backward(grad_output, input, bias, activation, gated, bias_gradient);
    return {made.input, made.bias};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.redispatch(keys & c10::after_autograd_keyset, grad_output, input, bias, activation, gated, bias_gradient);
}
}  // namespace apex
// No autocast rule: the output has the input's dtype, and the bias may have another.
APEX_FUNCTIONAL_OP(bias_activation_forward)
APEX_FUNCTIONAL_OP(bias_activation_backward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(bias_activation, m) {
  m.def(
      "bias_activation",
      [](const at::Tensor& input, const std::optional<at::Tensor>& bias, const std::string& activation, bool gated) {
        static const auto forward =
            apex::dispatcher_op<at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, c10::string_view,
                                           bool)>("apex::bias_activation_forward");
        return forward.call(input, bias, activation, gated);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
