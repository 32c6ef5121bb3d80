#pragma once
#include "generated/scaled_masked_softmax.h"
#include "checks.h"

#include <ATen/ops/empty.h>

namespace apex {
// `added`: the mask may have numbers, which are added.
inline void check_softmax(const char* op, const at::Tensor& input, const OptionalTensor& mask, bool causal,
                          bool added = false) {
  element_type(op, input.scalar_type());
  TORCH_CHECK_VALUE(input.dim() >= (causal ? 2 : 1), op, ": the input needs a dimension of keys",
                    causal ? " and one of queries" : "", ", but its shape is ", input.sym_sizes());
  if (!has_value(mask)) return;
  const at::ScalarType type = mask->scalar_type();
  TORCH_CHECK_TYPE(type == at::kBool || type == at::kByte || (added && at::isFloatingType(type)), op,
                   added ? ": the mask is bool or uint8, true where a key is left out, or of floating point, added to "
                           "the input, not "
                         : ": the mask is bool or uint8, true where a key is left out, not ",
                   type, added ? "" : "; a mask of numbers is added to the input instead");
  const auto wide = input.sym_sizes(), narrow = mask->sym_sizes();
  bool fits = narrow.size() <= wide.size();
  for (size_t i = 1; fits && i <= narrow.size(); ++i) {
    const c10::SymInt& size = narrow[narrow.size() - i];
    fits = size == 1 || size == wide[wide.size() - i];
  }
  TORCH_CHECK_VALUE(fits, op, ": the mask's shape ", narrow, " does not broadcast to the input's ", wide);
}

// What kernels are told of a contiguous tensor: batches of heads of queries of keys; dimensions before these four are
// batches.
template <class Arguments> Arguments softmax_arguments(const char* op, const at::Tensor& x) {
  Arguments a{};
  a.rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), a.keys = x.size(-1);
  a.queries = x.dim() > 1 ? x.size(-2) : 1;
  if constexpr (requires { a.heads; }) a.heads = x.dim() > 2 ? x.size(-3) : 1;
  a.type = element_type(op, x.scalar_type());
  return a;
}

// Sets the mask and its strides by batch, head and query, 0 where it is broadcast; the tensor must live as long.
inline at::Tensor set_softmax_mask(const at::Tensor& mask, const at::Tensor& x, gpu::SoftmaxForward* a) {
  at::Tensor m = mask;
  while (m.dim() < std::max<int64_t>(4, x.dim())) m = m.unsqueeze(0);
  if (x.dim() > 4) {
    std::vector<int64_t> sizes = x.sizes().vec();
    m = m.expand(sizes).reshape({-1, a->heads, a->queries, a->keys});
  }
  if (m.size(3) != a->keys || (m.stride(3) != 1 && a->keys > 1))
    m = m.expand({m.size(0), m.size(1), m.size(2), a->keys}).contiguous();
  const auto stride = [&](int64_t d) { return m.size(d) == 1 ? 0 : m.stride(d) * m.element_size(); };
  a->mask = bytes(m);
  a->mask_batch = stride(0), a->mask_head = stride(1), a->mask_query = stride(2);
  return m;
}

inline void ScaledMaskedSoftmaxForward::check() const { check_softmax(unit, input, mask, causal); }
inline at::Tensor ScaledMaskedSoftmaxForward::outputs() const {
  return at::empty_symint(input.sym_sizes(), input.options().memory_format(at::MemoryFormat::Contiguous));
}
inline bool ScaledMaskedSoftmaxForward::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = input.contiguous();
  made = outputs();
  auto a = softmax_arguments<gpu::SoftmaxForward>(unit, x);
  at::Tensor m;
  if (has_value(mask)) m = set_softmax_mask(*mask, x, &a);
  a.input = bytes(x), a.output = mutable_bytes(made);
  a.causal = causal;
  return !use_reference(apex_scaled_masked_softmax_forward(&place, &a, scale), unit);
}

inline void ScaledMaskedSoftmaxBackward::check() const {
  check_softmax(unit, output, std::nullopt, causal);
  check_like(unit, "the gradient", grad_output, output.sym_sizes(), output.scalar_type(), "the output's ");
}
inline at::Tensor ScaledMaskedSoftmaxBackward::outputs() const {
  return at::empty_symint(output.sym_sizes(), output.options().memory_format(at::MemoryFormat::Contiguous));
}
inline bool ScaledMaskedSoftmaxBackward::launch(const apex_place& place, Result& made) const {
  const at::Tensor dy = grad_output.contiguous(), y = output.contiguous();
  made = outputs();
  auto a = softmax_arguments<gpu::SoftmaxBackward>(unit, y);
  a.grad_output = bytes(dy), a.output = bytes(y), a.grad_input = mutable_bytes(made);
  a.causal = causal;
  return !use_reference(apex_scaled_masked_softmax_backward(&place, &a, scale), unit);
}
inline at::Tensor ScaledMaskedSoftmaxBackward::formula() const {
  check();
  const at::ScalarType math = math_type(output);
  at::Tensor dy = grad_output.to(math), y = output.to(math);
  if (causal) dy = dy.tril((output.sym_size(-1) - output.sym_size(-2)).guard_int(__FILE__, __LINE__));
  return (y * (dy - (y * dy).sum(-1, true)) * scale).to(output.scalar_type());
}
}  // namespace apex
