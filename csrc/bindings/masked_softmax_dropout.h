#pragma once
#include "generated/masked_softmax_dropout.h"
#include "scaled_masked_softmax.h"

namespace apex {
namespace dropout_softmax {
inline void check_dropout(const char* op, double dropout, const OptionalTensor& seed, const at::Tensor& input) {
  TORCH_CHECK_VALUE(dropout >= 0 && dropout <= 1, op, ": the dropout probability must be between 0 and 1, not ",
                    dropout);
  check_seed(op, dropout, seed, input);
}
inline at::Tensor like(const at::Tensor& tensor, at::ScalarType type, bool wanted = true) {
  const auto options = tensor.options().dtype(type).memory_format(at::MemoryFormat::Contiguous);
  return wanted ? at::empty_symint(tensor.sym_sizes(), options) : no_elements(tensor, type);
}
// The softmax is without elements where there is no dropout: so is its gradient.
inline bool is_there(const OptionalTensor& grad_softmax) {
  return has_value(grad_softmax) && grad_softmax->sym_numel() != 0;
}
}  // namespace dropout_softmax

inline void MaskedSoftmaxDropoutForward::check() const {
  check_softmax(unit, input, mask, false, true);
  dropout_softmax::check_dropout(unit, dropout, seed, input);
}
inline MaskedSoftmaxDropoutForward::Result MaskedSoftmaxDropoutForward::outputs() const {
  const at::ScalarType type = input.scalar_type();
  return {dropout_softmax::like(input, type), dropout_softmax::like(input, type, dropout > 0),
          dropout_softmax::like(input, at::kByte, keep_mask)};
}
inline bool MaskedSoftmaxDropoutForward::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = input.contiguous();
  made = outputs();
  auto& [output, softmax, kept] = made;
  auto a = softmax_arguments<gpu::SoftmaxForward>(unit, x);
  at::Tensor m, key;
  if (has_value(mask)) {
    a.additive = at::isFloatingType(mask->scalar_type());
    m = set_softmax_mask(a.additive ? mask->to(x.scalar_type()) : *mask, x, &a);
  }
  a.input = bytes(x), a.output = mutable_bytes(output);
  if (dropout > 0) {
    key = seed->contiguous();
    a.seed = bytes(key), a.softmax = mutable_bytes(softmax);
    if (keep_mask) a.kept = mutable_bytes(kept);
  } else if (keep_mask) {
    kept.fill_(1);
  }
  return !use_reference(apex_masked_softmax_dropout_forward(&place, &a, dropout), unit);
}

inline void MaskedSoftmaxDropoutBackward::check() const {
  check_softmax(unit, softmax, std::nullopt, false);
  check_like(unit, "the gradient", grad_output, softmax.sym_sizes(), softmax.scalar_type(), "the output's ");
  if (has_value(kept_mask)) {
    check_like(unit, "the mask of what was kept", *kept_mask, softmax.sym_sizes(), kept_mask->scalar_type());
    TORCH_CHECK_TYPE(kept_mask->scalar_type() == at::kByte || kept_mask->scalar_type() == at::kBool, unit,
                     ": the mask of what was kept is uint8 or bool, not ", kept_mask->scalar_type());
  }
  if (dropout_softmax::is_there(grad_softmax))
    check_like(unit, "the gradient", *grad_softmax, softmax.sym_sizes(), softmax.scalar_type(), "the output's ");
  dropout_softmax::check_dropout(unit, has_value(kept_mask) && dropout <= 1 && dropout >= 0 ? 0 : dropout, seed,
                                 softmax);
}
inline at::Tensor MaskedSoftmaxDropoutBackward::outputs() const {
  return dropout_softmax::like(softmax, softmax.scalar_type());
}
inline bool MaskedSoftmaxDropoutBackward::launch(const apex_place& place, Result& made) const {
  const at::Tensor dy = grad_output.contiguous(), y = softmax.contiguous(), bits = contiguous(kept_mask);
  at::Tensor key;
  made = outputs();
  auto a = softmax_arguments<gpu::SoftmaxBackward>(unit, y);
  a.grad_output = bytes(dy), a.output = bytes(y), a.grad_input = mutable_bytes(made);
  if (bits.defined()) {
    a.kept = bytes(bits);
  } else if (dropout > 0) {
    key = seed->contiguous();
    a.seed = bytes(key);
  }
  if (use_reference(apex_masked_softmax_dropout_backward(&place, &a, dropout), unit)) return false;
  if (!dropout_softmax::is_there(grad_softmax)) return true;
  at::Tensor second;  // it is linear in the gradients, and before dropout there is none
  const bool launched = MaskedSoftmaxDropoutBackward{*grad_softmax, softmax, {}, 0, {}, {}}.launch(place, second);
  if (launched) made.add_(second);
  return launched;
}
inline at::Tensor MaskedSoftmaxDropoutBackward::formula() const {
  check();
  const at::ScalarType math = math_type(softmax);
  at::Tensor dy = grad_output.to(math), y = softmax.to(math);
  if (has_value(kept_mask) || dropout > 0) {
    const at::Tensor kept = has_value(kept_mask) ? *kept_mask
                                                 : std::get<2>(dispatcher_op<MaskedSoftmaxDropoutForward>().call(
                                                       at::zeros_like(softmax), {}, dropout, seed, true));
    dy = dy.masked_fill(kept == 0, 0) * (dropout < 1 ? 1 / (1 - dropout) : 0);
  }
  if (dropout_softmax::is_there(grad_softmax)) dy = dy + grad_softmax->to(math);
  return (y * (dy - (y * dy).sum(-1, true))).to(softmax.scalar_type());
}
}  // namespace apex
