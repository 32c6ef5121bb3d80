// How an op of this folder enters torch's dispatcher (in torch_library.cpp) and Python (in python_module.cpp).
// The schema itself is a line of csrc/ops.schemas.
#pragma once

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <torch/library.h>

namespace apex {
// The dispatcher comes here as soon as one tensor is a meta tensor: a list that mixes such with others, a model
// that was materialised in part, would be left as it is without a word.
inline void check_meta(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor.defined() || tensor.device().is_meta(), "tensors on ", tensor.device(),
                    " and on the meta device, which has no data, do not go together");
}
inline void check_meta(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) check_meta(tensor);
}
inline void check_meta(const std::optional<at::Tensor>& tensor) {
  if (tensor) check_meta(*tensor);
}
template <class T> std::enable_if_t<std::is_arithmetic_v<T>> check_meta(T) {}

template <class Function> struct DoNothing;
template <class... Arguments> struct DoNothing<void(Arguments...)> {
  static void call(Arguments... arguments) { (check_meta(arguments), ...); }
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
