// How an op of this folder enters torch's dispatcher (in torch_library.cpp) and Python (in python_module.cpp).
// The schema itself is a line of csrc/ops.schemas.
#pragma once

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <torch/library.h>

#include "plain.h"

// The name of an op of the dispatcher, as a type.
#define APEX_OP_NAME(op)                                                  \
  namespace apex {                                                        \
  struct op##_name { static constexpr const char* text = "apex::" #op; }; \
  }

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

template <class Function> struct DoNothing;
template <class... Arguments> struct DoNothing<void(Arguments...)> {
  static void call(Arguments... arguments) { (each_tensor(&check_meta, arguments), ...); }
};

// An op that returns its results, and its meta kernel, of arguments that were looked at. Name::text is the op's.
template <auto Function, class Name> struct Checked;
template <class Result, class... Arguments, Result (*Function)(Arguments...), class Name> struct Checked<Function,
                                                                                                         Name> {
  static Result call(Arguments... arguments) {
    bool readable = true;
    (each_tensor([&](const at::Tensor& tensor) { readable = readable && is_readable(tensor); }, arguments), ...);
    if (!readable) refuse(arguments...);
    return Function(std::forward<Arguments>(arguments)...);
  }
  // The op's own words first: they name its arguments.
  static Result meta(Arguments... arguments) {
    Result made = Function(arguments...);
    (each_tensor(&check_meta, arguments), ...);
    return made;
  }

 private:
  static void refuse(const Arguments&... arguments) {
    const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(Name::text, "").schema();
    size_t index = 0;
    const auto check = [&](const at::Tensor& tensor) {
      if (!is_readable(tensor)) refuse_unless_plain(tensor, schema.name() + ": " + schema.arguments()[index].name());
    };
    ((each_tensor(check, arguments), ++index), ...);
  }
};
}  // namespace apex

// torch resolves the lazy bits of arguments by itself only where none is written.
#define APEX_RESOLVES_BITS(op)                                                                   \
  TORCH_LIBRARY_IMPL(apex, Negative, m) { m.impl(#op, torch::CppFunction::makeFallthrough()); }  \
  TORCH_LIBRARY_IMPL(apex, Conjugate, m) { m.impl(#op, torch::CppFunction::makeFallthrough()); } \
  TORCH_LIBRARY_IMPL(apex, ZeroTensor, m) { m.impl(#op, torch::CppFunction::makeFallthrough()); }

// An op that writes its arguments and returns nothing: one kernel for every device (it asks the probe), and a
// meta kernel with nothing to say about shapes.
#define APEX_IN_PLACE_OP(op)                                                         \
  APEX_RESOLVES_BITS(op)                                                             \
  TORCH_LIBRARY_IMPL(apex, CompositeExplicitAutograd, m) { m.impl(#op, &apex::op); } \
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
#define APEX_PYTHON_OP(op, m)                                                               \
  static void op##_python(pybind11::module_& m);                                            \
  static const bool op##_is_python_op = (apex::python_ops().push_back(&op##_python), true); \
  static void op##_python(pybind11::module_& m)
#endif
