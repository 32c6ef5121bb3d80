// One-element tensors that stand for scalars: learning rates, scales and flags that never visit the host.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <type_traits>

#include "plain.h"

namespace apex {
// The address of the tensor's one element, or null for none. Throws unless it is plain, and has that type on that
// device. T const: it is read. Else it is written: it gets memory of its own, and its version is counted.
template <class T> T* scalar_pointer(const std::optional<at::Tensor>& tensor, const char* name, c10::Device device) {
  if (!tensor || !tensor->defined()) return nullptr;
  constexpr at::ScalarType type = c10::CppTypeToScalarType<std::remove_const_t<T>>::value;
  TORCH_CHECK_TYPE(tensor->scalar_type() == type, name, " must be a ", type, " tensor, not ", tensor->scalar_type());
  TORCH_CHECK_VALUE(tensor->numel() == 1, name, " must hold one element, not ", tensor->numel());
  TORCH_CHECK_VALUE(tensor->device() == device, name, " is on ", tensor->device(), " but the tensors are on ", device);
  if (!is_plain(*tensor)) refuse_unless_plain(*tensor, name);
  if constexpr (std::is_const_v<T>) return static_cast<T*>(tensor->const_data_ptr());
  bump_version(*tensor);
  return static_cast<T*>(tensor->mutable_data_ptr());
}
}  // namespace apex
