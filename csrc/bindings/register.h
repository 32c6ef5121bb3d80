// How an op of this folder enters torch's dispatcher (in torch_library.cpp) and Python (in python_module.cpp).
// The schema itself is a line of csrc/ops.schemas.
#pragma once

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <torch/library.h>

#include "plain.h"

namespace apex {
// visit(tensor) for every tensor among an op's arguments.
template <class Visit> void each_tensor(const Visit& visit, const at::Tensor& tensor) { visit(tensor); }
template <class Visit> void each_tensor(const Visit& visit, at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) visit(tensor);
}
template <class Visit> void each_tensor(const Visit& visit, const std::optional<at::Tensor>& tensor) {
  if (tensor) visit(*tensor);
}
template <class T>
constexpr bool holds_no_tensor =
    std::is_arithmetic_v<T> || std::is_same_v<T, c10::SymInt> || std::is_same_v<T, c10::SymIntArrayRef> ||
    std::is_same_v<T, c10::string_view> || std::is_same_v<T, std::optional<int64_t>> ||
    std::is_same_v<T, std::optional<at::ScalarType>>;
template <class Visit, class T> std::enable_if_t<holds_no_tensor<T>> each_tensor(const Visit&, const T&) {}

// What the schema calls the first argument of the op `name` with a tensor that `is` holds of.
template <class Is, class... Arguments>
std::string argument_name(const std::string& name, const Is& is, const Arguments&... arguments) {
  const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(("apex::" + name).c_str(), "").schema();
  std::string found;
  size_t index = 0;
  const auto look = [&](const at::Tensor& tensor) {
    if (found.empty() && tensor.defined() && is(tensor)) found = schema.arguments()[index].name();
  };
  ((each_tensor(look, arguments), ++index), ...);
  return found;
}

// The dispatcher comes to a meta kernel as soon as one tensor is a meta tensor: where such are mixed with others, as by
// a model that was materialised in part, the others would be left as they are, or a result unset, without a word.
template <class... Arguments> void refuse_meta_beside_others(const char* name, const Arguments&... arguments) {
  const at::Tensor* other = nullptr;
  const auto is_other = [](const at::Tensor& tensor) { return !tensor.is_meta(); };
  const auto look = [&](const at::Tensor& tensor) {
    if (tensor.defined() && is_other(tensor)) other = &tensor;
  };
  (each_tensor(look, arguments), ...);
  if (!other) return;
  const std::string of_meta =
      argument_name(name, [](const at::Tensor& tensor) { return tensor.is_meta(); }, arguments...);
  TORCH_CHECK_VALUE(of_meta.empty(), name, ": ", of_meta, " is on meta, ", argument_name(name, is_other, arguments...),
                    " is not: tensors on ", other->device(),
                    " and on the meta device, which has no data, do not go together");
}
// Throws unless all tensors of an op lie on one device, whose kernels would read another's memory.
template <class... Arguments> void check_one_device(const char* name, const Arguments&... arguments) {
  const at::Tensor *first = nullptr, *other = nullptr;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!first) first = &tensor;
    if (tensor.device() != first->device()) other = &tensor;
  };
  (each_tensor(look, arguments), ...);
  if (!other) return;
  const auto named = [&](const at::Tensor* wanted) {
    return argument_name(name, [&](const at::Tensor& tensor) { return &tensor == wanted; }, arguments...);
  };
  TORCH_CHECK_VALUE(false, name, ": ", named(other), " is on ", other->device(), " but ", named(first), " is on ",
                    first->device());
}
// Whether kernels may read a tensor where it lies; none takes complex numbers. A device of another kind may have
// tensors without storage: there the reference runs.
inline bool is_readable(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  if (tensor.is_complex()) return false;
  if (is_plain(tensor)) return true;
  return !tensor.has_storage() && has_plain_keys(tensor) && !tensor.is_cpu() && !tensor.is_cuda();
}

template <class... Arguments> bool are_readable(const Arguments&... arguments) {
  bool readable = true;
  (each_tensor([&](const at::Tensor& tensor) { readable = readable && is_readable(tensor); }, arguments), ...);
  return readable;
}
// Throws for the argument that is not.
template <class... Arguments> void refuse_unreadable(const char* name, const Arguments&... arguments) {
  const auto refuse = [&](const at::Tensor& tensor) {
    if (is_readable(tensor)) return;
    const auto same = [&](const at::Tensor& other) { return &other == &tensor; };
    refuse_unless_plain(tensor, std::string("apex::") + name + ": " + argument_name(name, same, arguments...));
  };
  (each_tensor(refuse, arguments), ...);
}

// Of an op that returns nothing, on tensors without values. `Call` has its name.
template <class Call, class Signature = typename Call::Signature> struct DoNothing;
template <class Call, class... Arguments> struct DoNothing<Call, void(Arguments...)> {
  static void call(Arguments... arguments) { refuse_meta_beside_others(Call::name, arguments...); }
};
}  // namespace apex

#elif defined(APEX_PYTHON_MODULE_UNIT)
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

inline auto no_gil() { return py::call_guard<py::gil_scoped_release>(); }
#endif
