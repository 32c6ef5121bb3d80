// Functional ops: pairs x_forward / x_backward that return fresh tensors, with autograd written by hand.
//
// x_forward is differentiable by itself: its Autograd kernel makes a Node whose apply() calls x_backward through the
// dispatcher, so that a tracer sees the pair and nothing else. All of it is generated from csrc/ops.schemas but three
// functions of the struct of an op's arguments: check, outputs and launch.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>

#include "host/apex.h"
#include "register.h"

namespace apex {
using OptionalTensor = std::optional<at::Tensor>;

// The dispatcher's op of that name ("apex::rms_norm_forward"); keep it in a static.
template <class Function> c10::TypedOperatorHandle<Function> dispatcher_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>();
}
// Likewise, of the struct of its arguments.
template <class Call> const c10::TypedOperatorHandle<typename Call::Signature>& dispatcher_op() {
  static const auto op = dispatcher_op<typename Call::Signature>((std::string("apex::") + Call::name).c_str());
  return op;
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
// An argument that not all ops of a family have: nothing where `call`, of a template's type, is without.
inline const OptionalTensor nothing;
#define APEX_IF_ANY(call, argument)                                  \
  [&]() -> const OptionalTensor& {                                   \
    if constexpr (requires { call.argument; }) return call.argument; \
    else return nothing;                                             \
  }()
inline bool has_value(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

// The type that sums are made in.
inline at::ScalarType math_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }
inline at::ScalarType math_type(const at::Tensor& tensor) { return math_type(tensor.scalar_type()); }

// Null, or undefined, for none.
inline const uint8_t* bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const uint8_t*>(tensor.const_data_ptr()) : nullptr;
}
inline uint8_t* mutable_bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<uint8_t*>(tensor.mutable_data_ptr()) : nullptr;
}
inline at::Tensor contiguous(const OptionalTensor& tensor) {
  return has_value(tensor) ? tensor->contiguous() : at::Tensor();
}
// What was expanded from one element, as the gradients that sum() and mean() hand back.
inline bool is_one_value(const at::Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.stride(d) != 0 && tensor.size(d) != 1) return false;
  return true;
}
}  // namespace apex

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/version.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
inline const at::Tensor& first_tensor(const at::Tensor& tensor) { return tensor; }
template <class... Rest> const at::Tensor& first_tensor(const at::Tensor& tensor, const Rest&...) { return tensor; }

// An op's kernels, of the struct of its arguments: one for every device, one for shapes alone.
template <class Call, class Signature = typename Call::Signature> struct Kernels;
template <class Call, class Result, class... Arguments> struct Kernels<Call, Result(Arguments...)> {
  // Runs a variant of ours, or else the reference.
  static Result run(Arguments... arguments) {
    if (!are_readable(arguments...)) refuse_unreadable((std::string("apex::") + Call::name).c_str(), arguments...);
    const Call call{arguments...};
    call.check();
    const apex_place place = place_of(first_tensor(arguments...).device());
    Result made;
    if (place.platform >= 0 && call.launch(place, made)) return made;
    return call_reference<Result(Arguments...)>(Call::name, arguments...);
  }
  // The op's own words first: they name its arguments.
  static Result meta(Arguments... arguments) {
    const Call call{arguments...};
    call.check();
    Result made = call.outputs();
    (each_tensor(&check_meta, arguments), ...);
    return made;
  }
};

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

template <class Pointer> void set_history_of(const at::Tensor& made, const Pointer& node) {
  if (made.defined()) torch::autograd::set_history(made, node);
}
template <class... Tensors, class Pointer>
void set_history_of(const std::tuple<Tensors...>& made, const Pointer& node) {
  std::apply([&](const auto&... tensor) { (set_history_of(tensor, node), ...); }, made);
}

// What a Node keeps: a tensor, and a result of its own op, which holds the Node.
inline SavedVariable keep(const at::Tensor& tensor) { return SavedVariable(tensor, false); }
inline SavedVariable keep(const OptionalTensor& tensor) { return tensor ? keep(*tensor) : SavedVariable(); }
inline SavedVariable keep_result(const at::Tensor& tensor) { return SavedVariable(tensor, true); }
inline OptionalTensor if_any(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// While it lives, ops are called past their autograd kernels, where nothing records and nothing is to be refused.
class PastAutograd {
 public:
  explicit PastAutograd(const variable_list& gradients) {
    if (at::GradMode::is_enabled()) return;
    for (const at::Tensor& gradient : gradients)
      if (gradient.defined() && gradient._fw_grad(0).defined()) return;
    guard_.emplace();
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard_;
};

// The dtype that autocast asks for on a tensor's device.
inline at::ScalarType autocast_dtype(const at::Tensor& tensor) {
  return at::autocast::get_autocast_dtype(tensor.device().type());
}
// Autocast's rules that csrc/ops.schemas names.
inline at::Tensor autocast_cast(const at::Tensor& tensor) {
  const bool casts = tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
  return casts ? tensor.to(autocast_dtype(tensor)) : tensor;
}
inline at::Tensor promoted(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.to(c10::promoteTypes(tensor.scalar_type(), other.scalar_type()));
}
inline c10::impl::ExcludeDispatchKeyGuard without_autocast() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset);
}
}  // namespace apex
#endif
