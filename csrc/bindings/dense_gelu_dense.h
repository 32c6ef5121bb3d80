// Two layers with GELU between them: one op, which keeps what GELU was taken of and its result.
#pragma once
#include "generated/dense_gelu_dense.h"
#include "dense.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>

namespace apex {
namespace dense {
template <class Call> void check_layers(const Call& c) {
  check_input(c.unit, c.input);
  check_layer(c.unit, c.input, c.input.sym_size(-1), c.weight1, c.bias1);
  check_layer(c.unit, c.input, c.weight1.sym_size(0), c.weight2, c.bias2);
}
inline at::Tensor gradient_of(const OptionalTensor& tensor, bool wanted, const at::Tensor& input) {
  return has_value(tensor) ? gradient_of(*tensor, wanted) : none_of(input);
}
inline void* wanted(const at::Tensor& gradient) { return gradient.numel() ? mutable_bytes(gradient) : nullptr; }
}  // namespace dense

inline void DenseGeluDenseForward::check() const { dense::check_layers(*this); }
inline DenseGeluDenseForward::Result DenseGeluDenseForward::outputs() const {
  return {dense::output_of(input, weight2), dense::output_of(input, weight1), dense::output_of(input, weight1)};
}
inline bool DenseGeluDenseForward::launch(const apex_place& place, Result& made) const {
  if (!products::may_ask_vendor(place, input.scalar_type())) return false;
  made = outputs();
  const auto& [output, hidden, before] = made;
  const dense::Operands first(input, weight1, bias1), second(hidden, weight2, bias2);
  apex_dense d = first.layer(APEX_ACTIVATION_GELU);
  d.output = mutable_bytes(hidden), d.before = mutable_bytes(before);
  if (!dense::run(place, d, &apex_dense_forward, input, unit)) return false;
  d = second.layer(APEX_ACTIVATION_NONE);
  d.output = mutable_bytes(output);
  return dense::run(place, d, &apex_dense_forward, input, unit);
}

inline void DenseGeluDenseBackward::check() const {
  dense::check_layers(*this);
  check_like(unit, "the gradient", grad_output, dense::sizes_behind(input, weight2), input.scalar_type());
  for (const at::Tensor* saved : {&hidden, &before})
    check_like(unit, "what the forward kept", *saved, dense::sizes_behind(input, weight1), input.scalar_type());
}
inline DenseGeluDenseBackward::Result DenseGeluDenseBackward::outputs() const {
  return {dense::gradient_of(input, of_input), dense::gradient_of(weight1, of_first),
          dense::gradient_of(bias1, of_first, input), dense::gradient_of(weight2, of_second),
          dense::gradient_of(bias2, of_second, input)};
}
inline bool DenseGeluDenseBackward::launch(const apex_place& place, Result& made) const {
  if (!products::may_ask_vendor(place, input.scalar_type())) return false;
  made = outputs();
  const auto& [grad_input, grad_weight1, grad_bias1, grad_weight2, grad_bias2] = made;
  const at::Tensor g = grad_output.contiguous(), x = before.contiguous();
  const dense::Operands first(input, weight1, bias1), second(hidden, weight2, bias2);
  const bool reaches_first = of_first || of_input;
  const at::Tensor grad_hidden = reaches_first ? at::empty_like(x) : at::Tensor();
  apex_dense d = second.layer(APEX_ACTIVATION_NONE);
  d.grad_output = bytes(g), d.grad_input = mutable_bytes(grad_hidden);
  d.grad_weight = dense::wanted(grad_weight2), d.grad_bias = dense::wanted(grad_bias2);
  if (!dense::run(place, d, &apex_dense_backward, input, unit)) return false;
  if (!reaches_first) return true;
  d = first.layer(APEX_ACTIVATION_GELU);
  d.before = const_cast<uint8_t*>(bytes(x)), d.grad_output = bytes(grad_hidden),
  d.grad_input = dense::wanted(grad_input);
  d.grad_weight = dense::wanted(grad_weight1), d.grad_bias = dense::wanted(grad_bias1);
  return dense::run(place, d, &apex_dense_backward, input, unit);
}
inline DenseGeluDenseBackward::Result DenseGeluDenseBackward::formula() const {
  const at::Tensor x = dense::product(input, weight1, bias1), y = at::gelu(x, "tanh");
  const auto second = dense::gradients(grad_output, y, weight2, bias2, true, of_second, of_second);
  const at::Tensor g = second.input * act::value_and_slope(x, act::function_of("gelu")).second;
  const auto first = dense::gradients(g, input, weight1, bias1, of_input, of_first, of_first);
  return {first.input, first.weight, first.bias, second.weight, second.bias};
}
}  // namespace apex
