// One-element tensors that stand for scalars: learning rates, scales and flags that never visit the host.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace apex {
// The address of the tensor's one element, or null for none. Throws unless it has that dtype on that device.
template <class T>
T* scalar_pointer(const std::optional<at::Tensor>& tensor, const char* name, at::ScalarType type, c10::Device device) {
  if (!tensor || !tensor->defined()) return nullptr;
  TORCH_CHECK_TYPE(tensor->scalar_type() == type, name, " must be a ", type, " tensor, not ", tensor->scalar_type());
  TORCH_CHECK_VALUE(tensor->numel() == 1, name, " must hold one element, not ", tensor->numel());
  TORCH_CHECK_VALUE(tensor->device() == device, name, " is on ", tensor->device(), " but the tensors are on ", device);
  return static_cast<T*>(const_cast<void*>(tensor->const_data_ptr()));
}
}  // namespace apex
