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

// The dispatcher comes to a meta kernel as soon as one tensor is a meta tensor: where such are mixed with others, as by
// a model that was materialised in part, the others would be left as they are, or a result unset, without a word.
inline void check_meta(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor.defined() || tensor.device().is_meta(), "tensors on ", tensor.device(),
                    " and on the meta device, which has no data, do not go together");
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
  const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").schema();
  size_t index = 0;
  const auto check = [&](const at::Tensor& tensor) {
    if (!is_readable(tensor)) refuse_unless_plain(tensor, schema.name() + ": " + schema.arguments()[index].name());
  };
  ((each_tensor(check, arguments), ++index), ...);
}

template <class Function> struct DoNothing;
template <class... Arguments> struct DoNothing<void(Arguments...)> {
  static void call(Arguments... arguments) { (each_tensor(&check_meta, arguments), ...); }
};
}  // namespace apex

#elif defined(APEX_PYTHON_MODULE_UNIT)
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

inline auto no_gil() { return py::call_guard<py::gil_scoped_release>(); }
#endif
