// Autograd's side of an op: the Node that a forward op records, and what it keeps.
#pragma once
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

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

// A Node of ours, `Own`: its kept() ties the members that gradients(), which works out what apply() returns, reads;
// gives(i, given) says whether it has one for input i, where that is wanted, by which of `given` are defined.
//
// Compiled autograd (torch._dynamo.config.compiled_autograd) takes the whole backward pass as one graph: it asks what
// the Node keeps, and puts a call of from_values, with that as its arguments, into the graph. It adds up whatever it is
// not told to be absent.
template <class Own> struct OpNode : Node {
  variable_list apply(variable_list&& given) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return own().gradients(given);
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    each([](auto& kept) {
      if constexpr (is_saved<decltype(kept)>) kept.reset_data();
    });
  }
  std::string name() const override { return Own::shown; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(wanted());
    const_cast<OpNode*>(this)->each([&](auto& kept) {
      if constexpr (is_saved<decltype(kept)>) args.collect(kept, true);
      else args.collect(kept);
    });
  }
  variable_list apply_with_saved(const variable_list& given,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    each([&](auto& kept) { saved.before(kept); });
    PackedArgs packed;
    packed.pack(wanted());
    each([&](auto& kept) {
      if constexpr (is_saved<decltype(kept)>) packed.pack(kept.unpack(getptr()));
      else packed.pack(kept);
    });
    const auto& compiler = getPyCompilerInterface();
    static const std::string bound =
        compiler->bind_function(saved.get_py_compiler(), name(), &from_values, packed_types(), true, true);
    const auto metadata =
        IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(get_input_metadata(next_edges()));
    variable_list found =
        compiler->call_function(saved.get_py_compiler(), "apply_functional", bound, given, packed.vec(), metadata);
    for (size_t i = 0; i < found.size(); ++i)
      if (!own().gives(i, given)) found[i] = at::Tensor();
    each([&](auto& kept) { saved.after(kept); });
    return found;
  }

 protected:
  // Whether somebody asks for the gradient of that input.
  bool wants(size_t input) const { return wanted_ ? *wanted_ >> input & 1 : task_should_compute_output(input); }

 private:
  template <class T> static constexpr bool is_saved = std::is_same_v<std::remove_cvref_t<T>, SavedVariable>;

  Own& own() { return static_cast<Own&>(*this); }
  template <class Visit> void each(const Visit& visit) {
    std::apply([&](auto&... kept) { (visit(kept), ...); }, own().kept());
  }
  int64_t wanted() const {
    int64_t bits = 0;
    for (size_t i = 0; i < num_outputs(); ++i) bits |= int64_t(wants(i)) << i;
    return bits;
  }
  // What apply_with_saved packs.
  std::vector<at::TypePtr> packed_types() {
    using torch::dynamo::autograd::IValuePacker;
    std::vector<at::TypePtr> types{at::IntType::get()};
    each([&](auto& kept) {
      if constexpr (is_saved<decltype(kept)>) types.push_back(at::TensorType::get());
      else types.push_back(IValuePacker<std::remove_reference_t<decltype(kept)>>::packed_type());
    });
    return types;
  }
  // The gradients out of what was packed: of a Node that was never recorded.
  static variable_list from_values(const variable_list& given, const std::vector<c10::IValue>& values) {
    torch::dynamo::autograd::PackedArgs packed(values);
    const auto node = make_node<Own>();
    node->wanted_ = packed.template unpack<int64_t>();
    node->each([&](auto& kept) {
      if constexpr (is_saved<decltype(kept)>) {
        const at::Tensor tensor = packed.template unpack<at::Tensor>();
        const bool before = at::SavedTensorDefaultHooks::set_tracing(true);  // the hooks have had their turn
        kept = SavedVariable(tensor, false);
        at::SavedTensorDefaultHooks::set_tracing(before);
      } else {
        kept = packed.template unpack<std::remove_reference_t<decltype(kept)>>();
      }
    });
    return node->gradients(given);
  }

  std::optional<int64_t> wanted_;  // one bit an input; none: the running backward pass knows
};

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
  [[noreturn]] void refuse() const {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "apex ", op, ": the gradient of its gradient (double backward) ", why);
  }
  variable_list apply(variable_list&&) override { refuse(); }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse(); }
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
inline SavedVariable keep(const std::optional<at::Tensor>& tensor) { return tensor ? keep(*tensor) : SavedVariable(); }
inline SavedVariable keep_result(const at::Tensor& tensor) { return SavedVariable(tensor, true); }
inline std::optional<at::Tensor> if_any(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
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
}  // namespace apex
