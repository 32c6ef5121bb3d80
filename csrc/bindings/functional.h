// Functional ops: pairs x_forward / x_backward that return fresh tensors, with autograd written by hand.
//
// x_forward is differentiable by itself: its Autograd kernel makes a Node whose apply() calls x_backward through the
// dispatcher, so that a tracer sees the pair and nothing else. Every kernel of such an op is a function of the op's
// schema: see norm.h for one of each.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <optional>

#include "host/apex.h"
#include "register.h"

namespace apex {
// The dispatcher's op of that name ("apex::rms_norm_forward"); keep it in a static.
template <class Function> c10::TypedOperatorHandle<Function> dispatcher_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>();
}

// apex_dtype of a tensor's element type. Raises TypeError for those that no kernel takes.
inline int32_t element_type(const char* op, at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return APEX_F32;
    case at::kHalf:
      return APEX_F16;
    case at::kBFloat16:
      return APEX_BF16;
    case at::kDouble:
      return APEX_F64;
    default:
      TORCH_CHECK_TYPE(false, op, " takes float32, float16, bfloat16 and float64, not ", type);
  }
}
inline bool has_value(const std::optional<at::Tensor>& tensor) { return tensor && tensor->defined(); }
}  // namespace apex

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/version.h>

namespace apex {
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// From torch 2.13 a Node counts its own references.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
template <class T> using NodePointer = c10::intrusive_ptr<T>;
template <class T> NodePointer<T> make_node() { return c10::make_intrusive<T>(); }
#else
template <class T> using NodePointer = std::shared_ptr<T>;
template <class T> NodePointer<T> make_node() { return NodePointer<T>(new T, torch::autograd::deleteNode); }
#endif

inline bool requires_grad(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
inline bool requires_grad(const std::optional<at::Tensor>& tensor) { return tensor && requires_grad(*tensor); }
// Whether autograd must record an op of these inputs.
template <class... Inputs> bool records(const Inputs&... inputs) {
  return at::GradMode::is_enabled() && (requires_grad(inputs) || ...);
}

// A Node is backward mode alone: forward mode would go on with silent zeros.
inline void refuse_forward_mode(const char* op, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.defined() || !tensor._fw_grad(0).defined(), "apex ", op,
                              ": forward-mode automatic differentiation is not implemented");
}
inline void refuse_forward_mode(const char* op, const std::optional<at::Tensor>& tensor) {
  if (tensor) refuse_forward_mode(op, *tensor);
}
template <class... Inputs> void refuse_forward_mode_of(const char* op, const Inputs&... inputs) {
  (refuse_forward_mode(op, inputs), ...);
}

// Stands for the derivative of a backward op that has none: says so when it is asked for.
struct NoDoubleBackward : Node {
  const char* op = nullptr;
  const char* why = "is not implemented";
  variable_list apply(variable_list&&) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "apex ", op, ": the gradient of its gradient (double backward) ", why);
  }
  std::string name() const override { return "ApexNoDoubleBackward"; }
};
template <class... Inputs>
NodePointer<NoDoubleBackward> no_double_backward(const char* op, const char* why, const Inputs&... inputs) {
  auto node = make_node<NoDoubleBackward>();
  node->op = op;
  node->why = why;
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

// The dtype that autocast asks for on a tensor's device.
inline at::ScalarType autocast_dtype(const at::Tensor& tensor) {
  return at::autocast::get_autocast_dtype(tensor.device().type());
}
inline c10::impl::ExcludeDispatchKeyGuard without_autocast() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset);
}
}  // namespace apex

// One kernel for every device (it asks the probe), one for shapes alone, one that records.
#define APEX_FUNCTIONAL_OP(op)                                                                                \
  APEX_OP_NAME(op)                                                                                            \
  TORCH_LIBRARY_IMPL(apex, CompositeExplicitAutograd, m) {                                                    \
    m.impl(#op, &apex::Checked<&apex::op, apex::op##_name>::call);                                            \
  }                                                                                                           \
  TORCH_LIBRARY_IMPL(apex, Meta, m) { m.impl(#op, &apex::Checked<&apex::op##_meta, apex::op##_name>::meta); } \
  TORCH_LIBRARY_IMPL(apex, Autograd, m) { m.impl(#op, &apex::op##_autograd); }
// For forward ops: what it does under autocast.
#define APEX_AUTOCAST_OP(op)                                                      \
  TORCH_LIBRARY_IMPL(apex, AutocastCPU, m) { m.impl(#op, &apex::op##_autocast); } \
  TORCH_LIBRARY_IMPL(apex, AutocastCUDA, m) { m.impl(#op, &apex::op##_autocast); }
#endif
