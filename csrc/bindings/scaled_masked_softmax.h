#pragma once
#include "functional.h"
#include "host/scaled_masked_softmax.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/empty.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
// Throws for input that no variant takes. Works with symbolic sizes.
inline void check_scaled_masked_softmax(const at::Tensor& input, const std::optional<at::Tensor>& mask, bool causal) {
  const char* op = "scaled_masked_softmax";
  element_type(op, input.scalar_type());
  TORCH_CHECK_VALUE(input.dim() >= (causal ? 2 : 1), op, ": the input needs a dimension of keys",
                    causal ? " and one of queries" : "", ", but its shape is ", input.sym_sizes());
  if (!has_value(mask)) return;
  TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool || mask->scalar_type() == at::kByte, op,
                   ": the mask is bool or uint8, true where a key is "
                   "left out, not ",
                   mask->scalar_type(), "; a mask of numbers is added to the input instead");
  TORCH_CHECK_VALUE(mask->device() == input.device(), op, ": the mask is on ", mask->device(), " but the input is on ",
                    input.device());
  const auto wide = input.sym_sizes(), narrow = mask->sym_sizes();
  bool fits = narrow.size() <= wide.size();
  for (size_t i = 1; fits && i <= narrow.size(); ++i) {
    const c10::SymInt& size = narrow[narrow.size() - i];
    fits = size == 1 || size == wide[wide.size() - i];
  }
  TORCH_CHECK_VALUE(fits, op, ": the mask's shape ", narrow, " does not broadcast to the input's ", wide);
}

// A contiguous tensor as batches of heads of queries of keys; dimensions before these four are batches.
struct SoftmaxShape {
  int64_t rows = 1, heads = 1, queries = 1, keys;
  explicit SoftmaxShape(const at::Tensor& input) : keys(input.size(-1)) {
    for (int64_t d = 0; d + 1 < input.dim(); ++d) rows *= input.size(d);
    if (input.dim() > 1) queries = input.size(-2);
    if (input.dim() > 2) heads = input.size(-3);
  }
};

// ---- scaled_masked_softmax ----
inline at::Tensor scaled_masked_softmax_forward(const at::Tensor& input, const std::optional<at::Tensor>& mask,
                                                double scale, bool causal) {
  check_scaled_masked_softmax(input, mask, causal);
  const apex_place place = place_of(input.device());
  const auto reference = [&] {
    return call_reference<decltype(scaled_masked_softmax_forward)>("scaled_masked_softmax_forward", input, mask, scale,
                                                                   causal);
  };
  if (place.platform < 0) return reference();
  const at::Tensor x = input.contiguous(),
                   output = at::empty(input.sizes(), input.options().memory_format(at::MemoryFormat::Contiguous));
  const SoftmaxShape shape(x);
  gpu::SoftmaxForward a{};
  at::Tensor m;
  if (has_value(mask)) {  // its strides by batch, head and query: 0 where it is broadcast
    m = *mask;
    while (m.dim() < std::max<int64_t>(4, x.dim())) m = m.unsqueeze(0);
    if (x.dim() > 4) {
      std::vector<int64_t> sizes = x.sizes().vec();
      m = m.expand(sizes).reshape({-1, shape.heads, shape.queries, shape.keys});
    }
    if (m.size(3) != shape.keys || (m.stride(3) != 1 && shape.keys > 1))
      m = m.expand({m.size(0), m.size(1), m.size(2), shape.keys}).contiguous();
    const auto stride = [&](int64_t d) { return m.size(d) == 1 ? 0 : m.stride(d); };
    a.mask = static_cast<const gpu::u8*>(m.const_data_ptr());
    a.mask_batch = stride(0);
    a.mask_head = stride(1);
    a.mask_query = stride(2);
  }
  a.input = static_cast<const gpu::u8*>(x.const_data_ptr());
  a.output = static_cast<gpu::u8*>(output.mutable_data_ptr());
  a.rows = shape.rows;
  a.keys = shape.keys;
  a.heads = shape.heads;
  a.queries = shape.queries;
  a.type = element_type("scaled_masked_softmax", x.scalar_type());
  a.causal = causal;
  if (use_reference(apex_scaled_masked_softmax_forward(&place, &a, scale), "scaled_masked_softmax")) return reference();
  return output;
}

inline void check_scaled_masked_softmax_gradient(const at::Tensor& grad_output, const at::Tensor& output, bool causal) {
  const char* op = "scaled_masked_softmax";
  check_scaled_masked_softmax(output, std::nullopt, causal);
  TORCH_CHECK_VALUE(grad_output.sym_sizes() == output.sym_sizes() && grad_output.device() == output.device(), op,
                    ": the gradient must have the output's shape ", output.sym_sizes(), " and be on its device, ",
                    output.device());
  TORCH_CHECK_TYPE(grad_output.scalar_type() == output.scalar_type(), op,
                   ": the gradient must have the output's dtype ", output.scalar_type());
}
inline at::Tensor scaled_masked_softmax_backward(const at::Tensor& grad_output, const at::Tensor& output, double scale,
                                                 bool causal) {
  check_scaled_masked_softmax_gradient(grad_output, output, causal);
  const apex_place place = place_of(output.device());
  const auto reference = [&] {
    return call_reference<decltype(scaled_masked_softmax_backward)>("scaled_masked_softmax_backward", grad_output,
                                                                    output, scale, causal);
  };
  if (place.platform < 0) return reference();
  const at::Tensor dy = grad_output.contiguous(), y = output.contiguous();
  const at::Tensor grad_input = at::empty(y.sizes(), y.options().memory_format(at::MemoryFormat::Contiguous));
  const SoftmaxShape shape(y);
  gpu::SoftmaxBackward a{};
  a.grad_output = static_cast<const gpu::u8*>(dy.const_data_ptr());
  a.output = static_cast<const gpu::u8*>(y.const_data_ptr());
  a.grad_input = static_cast<gpu::u8*>(grad_input.mutable_data_ptr());
  a.rows = shape.rows;
  a.keys = shape.keys;
  a.queries = shape.queries;
  a.type = element_type("scaled_masked_softmax", y.scalar_type());
  a.causal = causal;
  if (use_reference(apex_scaled_masked_softmax_backward(&place, &a, scale), "scaled_masked_softmax"))
    return reference();
  return grad_input;
}

inline at::Tensor scaled_masked_softmax_forward_meta(const at::Tensor& input, const std::optional<at::Tensor>& mask,
                                                     double, bool causal) {
  check_scaled_masked_softmax(input, mask, causal);
  return at::empty_symint(input.sym_sizes(), input.options().memory_format(at::MemoryFormat::Contiguous));
}
inline at::Tensor scaled_masked_softmax_backward_meta(const at::Tensor& grad_output, const at::Tensor& output, double,
                                                      bool causal) {
  check_scaled_masked_softmax_gradient(grad_output, output, causal);
  return at::empty_symint(output.sym_sizes(), output.options().memory_format(at::MemoryFormat::Contiguous));
}

// Keeps the output alone. Public apex's writes its result over the gradient that it is given; this never does.
struct ScaledMaskedSoftmaxNode : Node {
  SavedVariable output;
  double scale = 1;
  bool causal = false;

  variable_list apply(variable_list&& gradients) override {
    static const auto backward =
        dispatcher_op<decltype(scaled_masked_softmax_backward)>("apex::scaled_masked_softmax_backward");
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list found(1);
    if (gradients[0].defined() && task_should_compute_output(0))
      found[0] = backward.call(gradients[0], output.unpack(getptr()), scale, causal);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    output.reset_data();
  }
  std::string name() const override { return "ApexScaledMaskedSoftmaxBackward"; }
};

inline at::Tensor scaled_masked_softmax_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                                         const std::optional<at::Tensor>& mask, double scale,
                                                         bool causal) {
  static const auto forward =
      dispatcher_op<decltype(scaled_masked_softmax_forward)>("apex::scaled_masked_softmax_forward");
  refuse_forward_mode("scaled_masked_softmax", input);
  const bool recorded = records(input);
  at::Tensor output = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward.redispatch(keys & c10::after_autograd_keyset, input, mask, scale, causal);
  }();
  if (recorded) {
    const auto node = make_node<ScaledMaskedSoftmaxNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    node->scale = scale;
    node->causal = causal;
    torch::autograd::set_history(output, node);
    node->output = SavedVariable(output, true);
  }
  return output;
}
// With create_graph=True its own derivative is wanted: the same by torch's differentiable ops.
inline at::Tensor scaled_masked_softmax_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_output,
                                                          const at::Tensor& output, double scale, bool causal) {
  static const auto backward =
      dispatcher_op<decltype(scaled_masked_softmax_backward)>("apex::scaled_masked_softmax_backward");
  refuse_forward_mode_of("scaled_masked_softmax", grad_output, output);
  if (records(grad_output, output)) {
    check_scaled_masked_softmax_gradient(grad_output, output, causal);
    const at::ScalarType math = output.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor dy = grad_output.to(math), y = output.to(math);
    if (causal) dy = dy.tril((output.sym_size(-1) - output.sym_size(-2)).guard_int(__FILE__, __LINE__));
    return (y * (dy - (y * dy).sum(-1, true)) * scale).to(output.scalar_type());
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return backward.redispatch(keys & c10::after_autograd_keyset, grad_output, output, scale, causal);
}
// As public apex: computed from, and into, autocast's dtype.
inline at::Tensor scaled_masked_softmax_forward_autocast(const at::Tensor& input, const std::optional<at::Tensor>& mask,
                                                         double scale, bool causal) {
  static const auto forward =
      dispatcher_op<decltype(scaled_masked_softmax_forward)>("apex::scaled_masked_softmax_forward");
  const auto guard = without_autocast();
  const bool casts = input.is_floating_point() && input.scalar_type() != at::kDouble;
  return forward.call(casts ? input.to(autocast_dtype(input)) : input, mask, scale, causal);
}
}  // namespace apex

APEX_FUNCTIONAL_OP(scaled_masked_softmax_forward)
APEX_FUNCTIONAL_OP(scaled_masked_softmax_backward)
APEX_AUTOCAST_OP(scaled_masked_softmax_forward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
// The forward past torch.ops: for eager calls.
APEX_PYTHON_OP(scaled_masked_softmax, m) {
  m.def(
      "scaled_masked_softmax",
      [](const at::Tensor& input, const std::optional<at::Tensor>& mask, double scale, bool causal) {
        static const auto forward =
            apex::dispatcher_op<at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, double, bool)>(
                "apex::scaled_masked_softmax_forward");
        return forward.call(input, mask, scale, causal);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
