#pragma once
#include "norm.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
// ---- rms_norm ----
inline std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& input,
                                                           c10::SymIntArrayRef normalized_shape,
                                                           const OptionalTensor& weight, double eps,
                                                           bool memory_efficient, std::optional<at::ScalarType> dtype) {
  check_norm("rms_norm", input, normalized_shape, weight, std::nullopt);
  NormOutputs o;
  if (run_norm_forward(rms_norm_functions, input, std::nullopt, normalized_shape, weight, std::nullopt, eps,
                       dtype.value_or(input.scalar_type()), &o))
    return {o.output, o.rstd};
  return call_reference<decltype(rms_norm_forward)>("rms_norm_forward", input, normalized_shape, weight, eps,
                                                    memory_efficient, dtype);
}
inline std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_output, const at::Tensor& saved,
                                                            const at::Tensor& rstd,
                                                            c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight, double eps,
                                                            bool memory_efficient, std::optional<at::ScalarType> dtype,
                                                            bool weight_gradients) {
  const OptionalTensor nothing;
  NormGradients g;
  if (run_norm_backward(rms_norm_functions,
                        {grad_output, nothing, saved, nothing, rstd, normalized_shape, weight, nothing, eps,
                         memory_efficient, dtype.value_or(saved.scalar_type()), weight_gradients},
                        &g))
    return {g.input, g.weight};
  return call_reference<decltype(rms_norm_backward)>("rms_norm_backward", grad_output, saved, rstd, normalized_shape,
                                                     weight, eps, memory_efficient, dtype, weight_gradients);
}
inline std::tuple<at::Tensor, at::Tensor> rms_norm_forward_meta(const at::Tensor& input,
                                                                c10::SymIntArrayRef normalized_shape,
                                                                const OptionalTensor& weight, double eps,
                                                                bool memory_efficient,
                                                                std::optional<at::ScalarType> dtype) {
  check_norm("rms_norm", input, normalized_shape, weight, std::nullopt);
  const NormOutputs o =
      norm_outputs(rms_norm_functions, input, false, normalized_shape, dtype.value_or(input.scalar_type()));
  return {o.output, o.rstd};
}
inline std::tuple<at::Tensor, at::Tensor> rms_norm_backward_meta(
    const at::Tensor& grad_output, const at::Tensor& saved, const at::Tensor& rstd,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype, bool weight_gradients) {
  const NormGradients g =
      norm_gradients(saved, dtype.value_or(saved.scalar_type()), weight, std::nullopt, weight_gradients);
  return {g.input, g.weight};
}
inline std::tuple<at::Tensor, at::Tensor> rms_norm_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                                                    c10::SymIntArrayRef normalized_shape,
                                                                    const OptionalTensor& weight, double eps,
                                                                    bool memory_efficient,
                                                                    std::optional<at::ScalarType> dtype) {
  static const auto forward = dispatcher_op<decltype(rms_norm_forward)>("apex::rms_norm_forward");
  const NormNode::Backward backward = [](const NormBackwardInputs& in) -> NormGradients {
    static const auto op = dispatcher_op<decltype(rms_norm_backward)>("apex::rms_norm_backward");
    const auto g = op.call(in.grad_output, in.saved, in.rstd, in.shape, in.weight, in.eps, in.from_output, in.dtype,
                           in.weight_gradients);
    return {std::get<0>(g), std::get<1>(g), at::Tensor()};
  };
  const NormOutputs made = record_norm(rms_norm_functions, backward, input, std::nullopt, normalized_shape, weight,
                                       std::nullopt, eps, memory_efficient, [&]() -> NormOutputs {
                                         const auto o =
                                             forward.redispatch(keys & c10::after_autograd_keyset, input,
                                                                normalized_shape, weight, eps, memory_efficient, dtype);
                                         return {std::get<0>(o), at::Tensor(), std::get<1>(o), at::Tensor()};
                                       });
  return {made.output, made.rstd};
}
inline std::tuple<at::Tensor, at::Tensor> rms_norm_backward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& saved, const at::Tensor& rstd,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype, bool weight_gradients) {
  static const auto backward = dispatcher_op<decltype(rms_norm_backward)>("apex::rms_norm_backward");
  const OptionalTensor nothing;
  const NormGradients made = record_norm_backward(
      rms_norm_functions,
      {grad_output, nothing, saved, nothing, rstd, normalized_shape, weight, nothing, eps, memory_efficient,
       dtype.value_or(saved.scalar_type()), weight_gradients},
      [&]() -> NormGradients {
        const auto g = backward.redispatch(keys & c10::after_autograd_keyset, grad_output, saved, rstd,
                                           normalized_shape, weight, eps, memory_efficient, dtype, weight_gradients);
        return {std::get<0>(g), std::get<1>(g), at::Tensor()};
      });
  return {made.input, made.weight};
}
inline std::tuple<at::Tensor, at::Tensor> rms_norm_forward_autocast(const at::Tensor& input,
                                                                    c10::SymIntArrayRef normalized_shape,
                                                                    const OptionalTensor& weight, double eps,
                                                                    bool memory_efficient,
                                                                    std::optional<at::ScalarType> dtype) {
  static const auto forward = dispatcher_op<decltype(rms_norm_forward)>("apex::rms_norm_forward");
  const auto guard = without_autocast();
  return forward.call(input, normalized_shape, weight, eps, memory_efficient, norm_autocast_dtype(input, dtype));
}

// ---- add_rms_norm ----
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype) {
  check_norm("rms_norm", input, normalized_shape, weight, std::nullopt);
  check_residual("rms_norm", input, residual);
  NormOutputs o;
  if (run_norm_forward(rms_norm_functions, input, OptionalTensor(residual), normalized_shape, weight, std::nullopt, eps,
                       dtype.value_or(input.scalar_type()), &o))
    return {o.output, o.sum, o.rstd};
  return call_reference<decltype(add_rms_norm_forward)>("add_rms_norm_forward", input, residual, normalized_shape,
                                                        weight, eps, memory_efficient, dtype);
}
inline std::tuple<at::Tensor, at::Tensor> add_rms_norm_backward(
    const at::Tensor& grad_output, const OptionalTensor& grad_sum, const at::Tensor& saved, const at::Tensor& rstd,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype, bool weight_gradients) {
  const OptionalTensor nothing;
  NormGradients g;
  if (run_norm_backward(rms_norm_functions,
                        {grad_output, grad_sum, saved, nothing, rstd, normalized_shape, weight, nothing, eps,
                         memory_efficient, dtype.value_or(saved.scalar_type()), weight_gradients},
                        &g))
    return {g.input, g.weight};
  return call_reference<decltype(add_rms_norm_backward)>("add_rms_norm_backward", grad_output, grad_sum, saved, rstd,
                                                         normalized_shape, weight, eps, memory_efficient, dtype,
                                                         weight_gradients);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward_meta(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype) {
  check_norm("rms_norm", input, normalized_shape, weight, std::nullopt);
  check_residual("rms_norm", input, residual);
  const NormOutputs o =
      norm_outputs(rms_norm_functions, input, true, normalized_shape, dtype.value_or(input.scalar_type()));
  return {o.output, o.sum, o.rstd};
}
inline std::tuple<at::Tensor, at::Tensor> add_rms_norm_backward_meta(
    const at::Tensor& grad_output, const OptionalTensor& grad_sum, const at::Tensor& saved, const at::Tensor& rstd,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, double eps, bool memory_efficient,
    std::optional<at::ScalarType> dtype, bool weight_gradients) {
  const NormGradients g =
      norm_gradients(saved, dtype.value_or(saved.scalar_type()), weight, std::nullopt, weight_gradients);
  return {g.input, g.weight};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype) {
  static const auto forward = dispatcher_op<decltype(add_rms_norm_forward)>("apex::add_rms_norm_forward");
  const NormNode::Backward backward = [](const NormBackwardInputs& in) -> NormGradients {
    static const auto op = dispatcher_op<decltype(add_rms_norm_backward)>("apex::add_rms_norm_backward");
    const auto g = op.call(in.grad_output, in.grad_sum, in.saved, in.rstd, in.shape, in.weight, in.eps, in.from_output,
                           in.dtype, in.weight_gradients);
    return {std::get<0>(g), std::get<1>(g), at::Tensor()};
  };
  const NormOutputs made = record_norm(rms_norm_functions, backward, input, OptionalTensor(residual), normalized_shape,
                                       weight, std::nullopt, eps, memory_efficient, [&]() -> NormOutputs {
                                         const auto o =
                                             forward.redispatch(keys & c10::after_autograd_keyset, input, residual,
                                                                normalized_shape, weight, eps, memory_efficient, dtype);
                                         return {std::get<0>(o), at::Tensor(), std::get<2>(o), std::get<1>(o)};
                                       });
  return {made.output, made.sum, made.rstd};
}
inline std::tuple<at::Tensor, at::Tensor> add_rms_norm_backward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const OptionalTensor& grad_sum, const at::Tensor& saved,
    const at::Tensor& rstd, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, double eps,
    bool memory_efficient, std::optional<at::ScalarType> dtype, bool weight_gradients) {
  static const auto backward = dispatcher_op<decltype(add_rms_norm_backward)>("apex::add_rms_norm_backward");
  const OptionalTensor nothing;
  const NormGradients made = record_norm_backward(
      rms_norm_functions,
      {grad_output, grad_sum, saved, nothing, rstd, normalized_shape, weight, nothing, eps, memory_efficient,
       dtype.value_or(saved.scalar_type()), weight_gradients},
      [&]() -> NormGradients {
        const auto g = backward.redispatch(keys & c10::after_autograd_keyset, grad_output, grad_sum, saved, rstd,
                                           normalized_shape, weight, eps, memory_efficient, dtype, weight_gradients);
        return {std::get<0>(g), std::get<1>(g), at::Tensor()};
      });
  return {made.input, made.weight};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward_autocast(
    const at::Tensor& input, const at::Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, double eps, bool memory_efficient, std::optional<at::ScalarType> dtype) {
  static const auto forward = dispatcher_op<decltype(add_rms_norm_forward)>("apex::add_rms_norm_forward");
  const auto guard = without_autocast();
  return forward.call(input, residual, normalized_shape, weight, eps, memory_efficient,
                      norm_autocast_dtype(input, dtype));
}
}  // namespace apex

APEX_FUNCTIONAL_OP(rms_norm_forward)
APEX_FUNCTIONAL_OP(rms_norm_backward)
APEX_AUTOCAST_OP(rms_norm_forward)
APEX_FUNCTIONAL_OP(add_rms_norm_forward)
APEX_FUNCTIONAL_OP(add_rms_norm_backward)
APEX_AUTOCAST_OP(add_rms_norm_forward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
// The forward's output alone (and the sum), past torch.ops: for eager calls.
APEX_PYTHON_OP(rms_norm, m) {
  m.def(
      "rms_norm",
      [](const at::Tensor& input, const std::vector<int64_t>& shape, const std::optional<at::Tensor>& weight,
         double eps, bool memory_efficient, std::optional<at::ScalarType> dtype) {
        static const auto forward = apex::dispatcher_op<std::tuple<at::Tensor, at::Tensor>(
            const at::Tensor&, c10::SymIntArrayRef, const std::optional<at::Tensor>&, double, bool,
            std::optional<at::ScalarType>)>("apex::rms_norm_forward");
        const auto o = forward.call(input, c10::fromIntArrayRefSlow(shape), weight, eps, memory_efficient, dtype);
        return std::get<0>(o);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def(
      "add_rms_norm",
      [](const at::Tensor& input, const at::Tensor& residual, const std::vector<int64_t>& shape,
         const std::optional<at::Tensor>& weight, double eps, bool memory_efficient,
         std::optional<at::ScalarType> dtype) {
        static const auto forward = apex::dispatcher_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
            const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef, const std::optional<at::Tensor>&, double, bool,
            std::optional<at::ScalarType>)>("apex::add_rms_norm_forward");
        const auto o =
            forward.call(input, residual, c10::fromIntArrayRefSlow(shape), weight, eps, memory_efficient, dtype);
        return std::make_tuple(std::get<0>(o), std::get<1>(o));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
