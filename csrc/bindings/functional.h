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

#include "dtype.h"
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

// What an op is without.
inline const at::Tensor no_tensor;
inline const OptionalTensor nothing;
inline bool has_value(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

// Null, or undefined, for none.
inline const uint8_t* bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const uint8_t*>(tensor.const_data_ptr()) : nullptr;
}
inline uint8_t* mutable_bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<uint8_t*>(tensor.mutable_data_ptr()) : nullptr;
}
inline at::Tensor contiguous(const OptionalTensor& tensor, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  return has_value(tensor) ? tensor->contiguous(format) : at::Tensor();
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
#include <ATen/ops/empty.h>

#include "autograd.h"
#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
// What an op gives in the place of a result that nobody asked for. torch's empty takes 2 us of a GPU's host for it.
inline at::Tensor no_elements(const at::Tensor& like, at::ScalarType type) {
  if (!has_plain_keys(like)) return at::empty({0}, like.options().dtype(type));  // of a tracer, or on meta
  const c10::Device device = like.device();
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
                    true);
  return at::detail::make_tensor<c10::TensorImpl>(
      std::move(none), c10::DispatchKeySet(c10::computeDispatchKey(type, at::kStrided, device)),
      caffe2::TypeMeta::fromScalarType(type));
}
inline at::Tensor no_elements(const at::Tensor& like) { return no_elements(like, like.scalar_type()); }

// An op's kernels, of the struct of its arguments: one for every device, one for shapes alone. It returns fresh
// tensors, or writes its arguments and returns nothing.
template <class Call, class Signature = typename Call::Signature> struct Kernels;
template <class Call, class Result, class... Arguments> struct Kernels<Call, Result(Arguments...)> {
  // Runs a variant of ours, or else the reference.
  static Result run(Arguments... arguments) {
    refuse_unreadable(Call::name, arguments...);
    check_one_device(Call::name, arguments...);
    const Call call{arguments...};
    call.check();
    const apex_place place = place_of(std::get<0>(std::tie(arguments...)).device());
    if constexpr (std::is_void_v<Result>) {
      if (place.platform >= 0 && call.launch(place)) return;
    } else {
      Result made;
      if (place.platform >= 0 && call.launch(place, made)) return made;
    }
    return call_reference<Result(Arguments...)>(Call::name, arguments...);
  }
  static Result meta(Arguments... arguments) {
    refuse_meta_beside_others(Call::name, arguments...);
    const Call call{arguments...};
    call.check();
    if constexpr (!std::is_void_v<Result>) return call.outputs();
  }
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
inline OptionalTensor autocast_cast(const OptionalTensor& tensor) {
  return has_value(tensor) ? OptionalTensor(autocast_cast(*tensor)) : std::nullopt;
}
inline at::Tensor promoted(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.to(c10::promoteTypes(tensor.scalar_type(), other.scalar_type()));
}
inline c10::impl::ExcludeDispatchKeyGuard without_autocast() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset);
}
}  // namespace apex
#endif
