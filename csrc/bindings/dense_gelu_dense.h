// Two layers with GELU between them: one op, which keeps what GELU was taken of and its result.
#pragma once
#include "generated/dense_gelu_dense.h"
#include "dense.h"

#include <ATen/ops/empty_like.h>

namespace apex {
namespace dense {
template <class Call> void check_layers(const Call& c) {
  check_input(c.unit, c.input);
  check_layer(c.unit, c.input, c.input.sym_size(-1), c.weight1, c.bias1);
  check_layer(c.unit, c.input, c.weight1.sym_size(0), c.weight2, c.bias2);
}
inline at::Tensor gradient_of(const OptionalTensor& tensor, bool wanted, const at::Tensor& input) {
  return has_value(tensor) ? gradient_of(*tensor, wanted) : no_elements(input);
}
inline void* wanted(const at::Tensor& gradient) { return gradient.numel() ? mutable_bytes(gradient) : nullptr; }
}  // namespace dense

inline void DenseGeluDenseForward::check() const { dense::check_layers(*this); }
inline DenseGeluDenseForward::Result DenseGeluDenseForward::outputs() const {
  return {dense::output_of(input, weight2), dense::output_of(input, weight1), dense::output_of(input, weight1)};
}
namespace dense {
inline bool ask_vendor(const DenseGeluDenseForward& c, const apex_place& place, DenseGeluDenseForward::Result& made) {
  if (!products::may_ask_vendor(place, c.input.scalar_type())) return false;
  made = c.outputs();
  const auto& [output, hidden, before] = made;
  const Operands first(c.input, c.weight1, c.bias1), second(hidden, c.weight2, c.bias2);
  apex_dense d = first.layer(APEX_ACTIVATION_GELU);
  d.output = mutable_bytes(hidden), d.before = mutable_bytes(before);
  if (!run(place, d, &apex_dense_forward, c.input, c.unit)) return false;
  d = second.layer(APEX_ACTIVATION_NONE);
  d.output = mutable_bytes(output);
  return run(place, d, &apex_dense_forward, c.input, c.unit);
}
}  // namespace dense

inline bool DenseGeluDenseForward::launch(const apex_place& place, Result& made) const {
  if (dense::ask_vendor(*this, place, made)) return true;
  const auto no_autocast = without_autocast();
  const at::Tensor before = dense::product(input, weight1, bias1), hidden = at::gelu(before, "tanh");
  made = {dense::product(hidden, weight2, bias2), hidden, before};
  return true;
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
namespace dense {
inline bool ask_vendor(const DenseGeluDenseBackward& c, const apex_place& place, DenseGeluDenseBackward::Result& made) {
  if (!products::may_ask_vendor(place, c.input.scalar_type())) return false;
  made = c.outputs();
  const auto& [grad_input, grad_weight1, grad_bias1, grad_weight2, grad_bias2] = made;
  const at::Tensor g = c.grad_output.contiguous(), x = c.before.contiguous();
  const Operands first(c.input, c.weight1, c.bias1), second(c.hidden, c.weight2, c.bias2);
  const bool reaches_first = c.of_first || c.of_input;
  const at::Tensor grad_hidden = reaches_first ? at::empty_like(x) : at::Tensor();
  apex_dense d = second.layer(APEX_ACTIVATION_NONE);
  d.grad_output = bytes(g), d.grad_input = mutable_bytes(grad_hidden);
  d.grad_weight = wanted(grad_weight2), d.grad_bias = wanted(grad_bias2);
  if (!run(place, d, &apex_dense_backward, c.input, c.unit)) return false;
  if (!reaches_first) return true;
  d = first.layer(APEX_ACTIVATION_GELU);
  d.before = const_cast<uint8_t*>(bytes(x)), d.grad_output = bytes(grad_hidden), d.grad_input = wanted(grad_input);
  d.grad_weight = wanted(grad_weight1), d.grad_bias = wanted(grad_bias1);
  return run(place, d, &apex_dense_backward, c.input, c.unit);
}
}  // namespace dense

inline bool DenseGeluDenseBackward::launch(const apex_place& place, Result& made) const {
  if (dense::ask_vendor(*this, place, made)) return true;
  const auto no_autocast = without_autocast();
  const bool reaches_first = of_first || of_input;
  const auto second = dense::gradients(grad_output, hidden, weight2, bias2, reaches_first, of_second, of_second);
  dense::Gradients first{no_elements(input), no_elements(input), no_elements(input)};
  if (reaches_first) {
    const at::Tensor g = dense::before_activation(second.input, before, "gelu");
    first = dense::gradients(g, input, weight1, bias1, of_input, of_first, of_first);
  }
  made = {first.input, first.weight, first.bias, second.weight, second.bias};
  return true;
}
inline DenseGeluDenseBackward::Result DenseGeluDenseBackward::formula() const {
  const at::Tensor x = dense::product(input, weight1, bias1), y = at::gelu(x, "tanh");
  const auto second = dense::gradients(grad_output, y, weight2, bias2, true, of_second, of_second);
  const at::Tensor g = dense::before_activation(second.input, x, "gelu");
  const auto first = dense::gradients(g, input, weight1, bias1, of_input, of_first, of_first);
  return {first.input, first.weight, first.bias, second.weight, second.bias};
}
}  // namespace apex
