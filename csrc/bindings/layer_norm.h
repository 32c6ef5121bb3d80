#pragma once
#include "norm.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
// ---- layer_norm ----
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype) {
  check_norm("layer_norm", input, normalized_shape, weight, bias);
  NormOutputs o;
  if (run_norm_forward(layer_norm_functions, input, std::nullopt, normalized_shape, weight, bias, eps,
                       dtype.value_or(input.scalar_type()), &o))
    return {o.output, o.mean, o.rstd};
  return call_reference<decltype(layer_norm_forward)>("layer_norm_forward", input, normalized_shape, weight, bias, eps,
                                                      memory_efficient, dtype);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& saved, const OptionalTensor& mean, const at::Tensor& rstd,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
    bool memory_efficient, std::optional<at::ScalarType> dtype, bool weight_gradients) {
  const OptionalTensor nothing;
  NormGradients g;
  if (run_norm_backward(layer_norm_functions,
                        {grad_output, nothing, saved, mean, rstd, normalized_shape, weight, bias, eps, memory_efficient,
                         dtype.value_or(saved.scalar_type()), weight_gradients},
                        &g))
    return {g.input, g.weight, g.bias};
  return call_reference<decltype(layer_norm_backward)>("layer_norm_backward", grad_output, saved, mean, rstd,
                                                       normalized_shape, weight, bias, eps, memory_efficient, dtype,
                                                       weight_gradients);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward_meta(
    const at::Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype) {
  check_norm("layer_norm", input, normalized_shape, weight, bias);
  const NormOutputs o =
      norm_outputs(layer_norm_functions, input, false, normalized_shape, dtype.value_or(input.scalar_type()));
  return {o.output, o.mean, o.rstd};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward_meta(
    const at::Tensor& grad_output, const at::Tensor& saved, const OptionalTensor& mean, const at::Tensor& rstd,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
    bool memory_efficient, std::optional<at::ScalarType> dtype, bool weight_gradients) {
  const NormGradients g = norm_gradients(saved, dtype.value_or(saved.scalar_type()), weight, bias, weight_gradients);
  return {g.input, g.weight, g.bias};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype) {
  static const auto forward = dispatcher_op<decltype(layer_norm_forward)>("apex::layer_norm_forward");
  const NormNode::Backward backward = [](const NormBackwardInputs& in) -> NormGradients {
    static const auto op = dispatcher_op<decltype(layer_norm_backward)>("apex::layer_norm_backward");
    const auto g = op.call(in.grad_output, in.saved, in.mean, in.rstd, in.shape, in.weight, in.bias, in.eps,
                           in.from_output, in.dtype, in.weight_gradients);
    return {std::get<0>(g), std::get<1>(g), std::get<2>(g)};
  };
  const NormOutputs made =
      record_norm(layer_norm_functions, backward, input, std::nullopt, normalized_shape, weight, bias, eps,
                  memory_efficient, [&]() -> NormOutputs {
                    const auto o = forward.redispatch(keys & c10::after_autograd_keyset, input, normalized_shape,
                                                      weight, bias, eps, memory_efficient, dtype);
                    return {std::get<0>(o), std::get<1>(o), std::get<2>(o), at::Tensor()};
                  });
  return {made.output, made.mean, made.rstd};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& saved, const OptionalTensor& mean,
    const at::Tensor& rstd, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype,
    bool weight_gradients) {
  static const auto backward = dispatcher_op<decltype(layer_norm_backward)>("apex::layer_norm_backward");
  const OptionalTensor nothing;
  const NormGradients made =
      record_norm_backward(layer_norm_functions,
                           {grad_output, nothing, saved, mean, rstd, normalized_shape, weight, bias, eps,
                            memory_efficient, dtype.value_or(saved.scalar_type()), weight_gradients},
                           [&]() -> NormGradients {
                             const auto g = backward.redispatch(keys & c10::after_autograd_keyset, grad_output, saved,
                                                                mean, rstd, normalized_shape, weight, bias, eps,
                                                                memory_efficient, dtype, weight_gradients);
                             return {std::get<0>(g), std::get<1>(g), std::get<2>(g)};
                           });
  return {made.input, made.weight, made.bias};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward_autocast(
    const at::Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype) {
  static const auto forward = dispatcher_op<decltype(layer_norm_forward)>("apex::layer_norm_forward");
  const auto guard = without_autocast();
  return forward.call(input, normalized_shape, weight, bias, eps, memory_efficient, norm_autocast_dtype(input, dtype));
}

// ---- add_layer_norm ----
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_forward(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype) {
  check_norm("layer_norm", input, normalized_shape, weight, bias);
  check_residual("layer_norm", input, residual);
  NormOutputs o;
  if (run_norm_forward(layer_norm_functions, input, OptionalTensor(residual), normalized_shape, weight, bias, eps,
                       dtype.value_or(input.scalar_type()), &o))
    return {o.output, o.sum, o.mean, o.rstd};
  return call_reference<decltype(add_layer_norm_forward)>("add_layer_norm_forward", input, residual, normalized_shape,
                                                          weight, bias, eps, memory_efficient, dtype);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> add_layer_norm_backward(
    const at::Tensor& grad_output, const OptionalTensor& grad_sum, const at::Tensor& saved, const OptionalTensor& mean,
    const at::Tensor& rstd, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype,
    bool weight_gradients) {
  NormGradients g;
  if (run_norm_backward(layer_norm_functions,
                        {grad_output, grad_sum, saved, mean, rstd, normalized_shape, weight, bias, eps,
                         memory_efficient, dtype.value_or(saved.scalar_type()), weight_gradients},
                        &g))
    return {g.input, g.weight, g.bias};
  return call_reference<decltype(add_layer_norm_backward)>("add_layer_norm_backward", grad_output, grad_sum, saved,
                                                           mean, rstd, normalized_shape, weight, bias, eps,
                                                           memory_efficient, dtype, weight_gradients);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_forward_meta(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype) {
  check_norm("layer_norm", input, normalized_shape, weight, bias);
  check_residual("layer_norm", input, residual);
  const NormOutputs o =
      norm_outputs(layer_norm_functions, input, true, normalized_shape, dtype.value_or(input.scalar_type()));
  return {o.output, o.sum, o.mean, o.rstd};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> add_layer_norm_backward_meta(
    const at::Tensor& grad_output, const OptionalTensor& grad_sum, const at::Tensor& saved, const OptionalTensor& mean,
    const at::Tensor& rstd, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype,
    bool weight_gradients) {
  const NormGradients g = norm_gradients(saved, dtype.value_or(saved.scalar_type()), weight, bias, weight_gradients);
  return {g.input, g.weight, g.bias};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_forward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype) {
  static const auto forward = dispatcher_op<decltype(add_layer_norm_forward)>("apex::add_layer_norm_forward");
  const NormNode::Backward backward = [](const NormBackwardInputs& in) -> NormGradients {
    static const auto op = dispatcher_op<decltype(add_layer_norm_backward)>("apex::add_layer_norm_backward");
    const auto g = op.call(in.grad_output, in.grad_sum, in.saved, in.mean, in.rstd, in.shape, in.weight, in.bias,
                           in.eps, in.from_output, in.dtype, in.weight_gradients);
    return {std::get<0>(g), std::get<1>(g), std::get<2>(g)};
  };
  const NormOutputs made =
      record_norm(layer_norm_functions, backward, input, OptionalTensor(residual), normalized_shape, weight, bias, eps,
                  memory_efficient, [&]() -> NormOutputs {
                    const auto o = forward.redispatch(keys & c10::after_autograd_keyset, input, residual,
                                                      normalized_shape, weight, bias, eps, memory_efficient, dtype);
                    return {std::get<0>(o), std::get<2>(o), std::get<3>(o), std::get<1>(o)};
                  });
  return {made.output, made.sum, made.mean, made.rstd};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> add_layer_norm_backward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const OptionalTensor& grad_sum, const at::Tensor& saved,
    const OptionalTensor& mean, const at::Tensor& rstd, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype, bool weight_gradients) {
  static const auto backward = dispatcher_op<decltype(add_layer_norm_backward)>("apex::add_layer_norm_backward");
  const NormGradients made =
      record_norm_backward(layer_norm_functions,
                           {grad_output, grad_sum, saved, mean, rstd, normalized_shape, weight, bias, eps,
                            memory_efficient, dtype.value_or(saved.scalar_type()), weight_gradients},
                           [&]() -> NormGradients {
                             const auto g = backward.redispatch(keys & c10::after_autograd_keyset, grad_output,
                                                                grad_sum, saved, mean, rstd, normalized_shape, weight,
                                                                bias, eps, memory_efficient, dtype, weight_gradients);
                             return {std::get<0>(g), std::get<1>(g), std::get<2>(g)};
                           });
  return {made.input, made.weight, made.bias};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_forward_autocast(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype) {
  static const auto forward = dispatcher_op<decltype(add_layer_norm_forward)>("apex::add_layer_norm_forward");
  const auto guard = without_autocast();
  return forward.call(input, residual, normalized_shape, weight, bias, eps, memory_efficient,
                      norm_autocast_dtype(input, dtype));
}
}  // namespace apex

APEX_FUNCTIONAL_OP(layer_norm_forward)
APEX_FUNCTIONAL_OP(layer_norm_backward)
APEX_AUTOCAST_OP(layer_norm_forward)
APEX_FUNCTIONAL_OP(add_layer_norm_forward)
APEX_FUNCTIONAL_OP(add_layer_norm_backward)
APEX_AUTOCAST_OP(add_layer_norm_forward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
// The forward's output alone (and the sum), past torch.ops: for eager calls.
APEX_PYTHON_OP(layer_norm, m) {
  m.def(
      "layer_norm",
      [](const at::Tensor& input, const std::vector<int64_t>& shape, const std::optional<at::Tensor>& weight,
         const std::optional<at::Tensor>& bias, double eps, bool memory_efficient,
         std::optional<at::ScalarType> dtype) {
        static const auto forward = apex::dispatcher_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
            const at::Tensor&, c10::SymIntArrayRef, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
            double, bool, std::optional<at::ScalarType>)>("apex::layer_norm_forward");
        const auto o = forward.call(input, c10::fromIntArrayRefSlow(shape), weight, bias, eps, memory_efficient, dtype);
        return std::get<0>(o);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def(
      "add_layer_norm",
      [](const at::Tensor& input, const at::Tensor& residual, const std::vector<int64_t>& shape,
         const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
         bool memory_efficient, std::optional<at::ScalarType> dtype) {
        static const auto forward = apex::dispatcher_op<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
            const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef, const std::optional<at::Tensor>&,
            const std::optional<at::Tensor>&, double, bool, std::optional<at::ScalarType>)>(
            "apex::add_layer_norm_forward");
        const auto o =
            forward.call(input, residual, c10::fromIntArrayRefSlow(shape), weight, bias, eps, memory_efficient, dtype);
        return std::make_tuple(std::get<0>(o), std::get<1>(o));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
