// How an op of this folder enters torch's dispatcher (in torch_library.cpp) and Python (in python_module.cpp).
// The schema itself is a line of csrc/ops.schemas.
#pragma once

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <torch/library.h>

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
constexpr bool holds_no_tensor = std::is_arithmetic_v<T> || std::is_same_v<T, c10::SymInt> || std::is_same_v<T, c10::SymIntArrayRef> ||
                                 std::is_same_v<T, c10::string_view> || std::is_same_v<T, std::optional<int64_t>> ||
                                 std::is_same_v<T, std::optional<at::ScalarType>>;
template <class Visit, class T> std::enable_if_t<holds_no_tensor<T>> each_tensor(const Visit&, const T&) {}

// The dispatcher comes to a meta kernel as soon as one tensor is a meta tensor: where such are mixed with others, as by
// a model that was materialised in part, the others would be left as they are, or a result unset, without a word.
inline void check_meta(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor.defined() || tensor.device().is_meta(), "tensors on ", tensor.device(),
                    " and on the meta device, which has no data, do not go together");
}
// Memory that was freed, as FSDP frees that of parameters, is at address 0: kernels would read there, or take a weight
// to be absent.
inline void check_memory(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || !tensor.has_storage() || tensor.unsafeGetTensorImpl()->storage_initialized(),
              "a tensor of shape ", tensor.sizes(), " has no memory: it was freed, or not allocated yet (FSDP frees that of parameters after "
              "each use)");
}

template <class Function> struct DoNothing;
template <class... Arguments> struct DoNothing<void(Arguments...)> {
  static void call(Arguments... arguments) { (each_tensor(&check_meta, arguments), ...); }
};

// An op that returns its results, and its meta kernel, of arguments that were looked at.
template <auto Function> struct Checked;
template <class Result, class... Arguments, Result (*Function)(Arguments...)> struct Checked<Function> {
  static Result call(Arguments... arguments) {
    (each_tensor(&check_memory, arguments), ...);
    return Function(std::forward<Arguments>(arguments)...);
  }
  // The op's own words first: they name its arguments.
  static Result meta(Arguments... arguments) {
    Result made = Function(arguments...);
    (each_tensor(&check_meta, arguments), ...);
    return made;
  }
};
}  // namespace apex

// An op that writes its arguments and returns nothing: one kernel for every device (it asks the probe), and a
// meta kernel with nothing to say about shapes.
#define APEX_IN_PLACE_OP(op)                                                                       \
  TORCH_LIBRARY_IMPL(apex, CompositeExplicitAutograd, m) { m.impl(#op, &apex::op); }               \
  TORCH_LIBRARY_IMPL(apex, Meta, m) { m.impl(#op, &apex::DoNothing<decltype(apex::op)>::call); }

#elif defined(APEX_PYTHON_MODULE_UNIT)
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace apex {
// Functions that add an op's entries to the module, in the order of the registry.
inline std::vector<void (*)(pybind11::module_&)>& python_ops() {
  static std::vector<void (*)(pybind11::module_&)> ops;
  return ops;
}
}  // namespace apex

#define APEX_IN_PLACE_OP(op)
#define APEX_PYTHON_OP(op, m)                                                                           \
  static void op##_python(pybind11::module_& m);                                                        \
  static const bool op##_is_python_op = (apex::python_ops().push_back(&op##_python), true);             \
  static void op##_python(pybind11::module_& m)
#endif
