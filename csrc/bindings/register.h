// How an op of this folder enters torch's dispatcher (in torch_library.cpp).
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

// The first tensor among an op's arguments that `is` holds of; null: none.
template <class Is, class... Arguments> const at::Tensor* find_tensor(const Is& is, const Arguments&... arguments) {
  const at::Tensor* found = nullptr;
  const auto look = [&](const at::Tensor& tensor) {
    if (!found && tensor.defined() && is(tensor)) found = &tensor;
  };
  (each_tensor(look, arguments), ...);
  return found;
}
// What the schema of the op `name` calls the argument that `tensor` is, or is in.
template <class... Arguments>
std::string argument_name(const std::string& name, const at::Tensor* tensor, const Arguments&... arguments) {
  const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(("apex::" + name).c_str(), "").schema();
  const auto is_it = [&](const at::Tensor& other) { return &other == tensor; };
  size_t index = 0;
  ((find_tensor(is_it, arguments) || (++index, false)) || ...);
  return schema.arguments()[index].name();
}

// The dispatcher comes to a meta kernel as soon as one tensor is a meta tensor: where such are mixed with others, as by
// a model that was materialised in part, the others would be left as they are, or a result unset, without a word.
template <class... Arguments> void refuse_meta_beside_others(const char* name, const Arguments&... arguments) {
  const at::Tensor* other = find_tensor([](const at::Tensor& tensor) { return !tensor.is_meta(); }, arguments...);
  if (!other) return;
  const at::Tensor* meta = find_tensor([](const at::Tensor& tensor) { return tensor.is_meta(); }, arguments...);
  TORCH_CHECK_VALUE(!meta, name, ": ", argument_name(name, meta, arguments...), " is on meta, ",
                    argument_name(name, other, arguments...), " is not: tensors on ", other->device(),
                    " and on the meta device, which has no data, do not go together");
}
// Throws unless all tensors of an op lie on one device, whose kernels would read another's memory.
template <class... Arguments> void check_one_device(const char* name, const Arguments&... arguments) {
  const at::Tensor* first = find_tensor([](const at::Tensor&) { return true; }, arguments...);
  const auto is_elsewhere = [&](const at::Tensor& tensor) { return tensor.device() != first->device(); };
  const at::Tensor* other = find_tensor(is_elsewhere, arguments...);
  TORCH_CHECK_VALUE(!other, name, ": ", argument_name(name, other, arguments...), " is on ", other->device(), " but ",
                    argument_name(name, first, arguments...), " is on ", first->device());
}
// Whether kernels may read a tensor where it lies; none takes complex numbers. A device of another kind may have
// tensors without storage: there the reference runs.
inline bool is_readable(const at::Tensor& tensor) {
  if (tensor.is_complex()) return false;
  if (is_plain(tensor)) return true;
  return !tensor.has_storage() && has_plain_keys(tensor) && !tensor.is_cpu() && !tensor.is_cuda();
}
// Throws for an argument that is not.
template <class... Arguments> void refuse_unreadable(const char* name, const Arguments&... arguments) {
  const at::Tensor* found = find_tensor([](const at::Tensor& tensor) { return !is_readable(tensor); }, arguments...);
  if (found)
    refuse_unless_plain(*found, std::string("apex::") + name + ": " + argument_name(name, found, arguments...));
}

// Of an op that returns nothing, on tensors without values. `Call` has its name.
template <class Call, class Signature = typename Call::Signature> struct DoNothing;
template <class Call, class... Arguments> struct DoNothing<Call, void(Arguments...)> {
  static void call(Arguments... arguments) { refuse_meta_beside_others(Call::name, arguments...); }
};
}  // namespace apex
#endif
