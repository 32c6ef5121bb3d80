// What ops over lists of tensors need: fields of their device's arguments, lists as Python and plans hand them over.
#pragma once
#include <type_traits>

#include "optimizer_plan.h"
#include "per_tensor.h"
#include "place.h"
#include "reference.h"
#include "register.h"
#include "scalars.h"
#include "status.h"
#include "tensor_plan.h"
#include "workspace.h"

namespace apex {
template <class Field, class Value> void set(Field& field, Value value) { field = static_cast<Field>(value); }
// The address of a tensor of one element that the op reads, though the field may be one that another op writes.
template <class T>
void set(T*& field, const std::optional<at::Tensor>& tensor, const char* name, c10::Device device) {
  field = const_cast<T*>(scalar_pointer<const T>(tensor, name, device));
}
template <class T>
void set_written(T*& field, const std::optional<at::Tensor>& tensor, const char* name, c10::Device device) {
  field = scalar_pointer<T>(tensor, name, device);
}

// As the reference of one bucket must see a call: that of the last bucket advances the step, the others count one
// ahead themselves.
template <class Call> Call of_bucket(const Call& call, const TensorPlan::Launch& l) {
  Call of_this = call;
  if (!call.advance_step || l.last) return of_this;
  if (call.step_tensor) of_this.step_tensor = call.step_tensor->add(1);
  of_this.advance_step = false;
  return of_this;
}

// List k, or an empty one if it was left out.
inline const std::vector<at::Tensor>& list_of(const Lists& lists, size_t k) {
  static const std::vector<at::Tensor> none;
  return k < lists.size() ? lists[k] : none;
}
// Throws unless there are as many lists as the op takes. `named`: in words.
inline const Lists& lists_of(const PlanOrLists& tensors, const char* op, size_t least, size_t most, const char* named) {
  const Lists& lists = std::get<Lists>(tensors);
  const std::string wanted = least == most ? "" : std::to_string(least) + (most - least > 1 ? " to " : " or ");
  TORCH_CHECK_VALUE(lists.size() >= least && lists.size() <= most, op, ": ", wanted, most, " tensor lists (", named,
                    ") are required, not ", lists.size());
  return lists;
}

// Checks that several optimizers share.
template <class Call> void check_betas(const Call& call) {
  TORCH_CHECK_VALUE(call.beta1 >= 0 && call.beta1 < 1 && call.beta2 >= 0 && call.beta2 < 1, Call::name,
                    ": betas must lie in [0, 1), not ", call.beta1, " and ", call.beta2);
}
template <class Call> void check_decay_mode(const Call& call) {
  TORCH_CHECK_VALUE(call.decay_mode == 0 || call.decay_mode == 1, Call::name,
                    ": decay_mode is 0 (L2) or 1 (decoupled), not ", call.decay_mode);
}
template <class Call> void check_step(const Call& call) {
  bool counts = true;
  if constexpr (requires { call.step_tensor; }) counts = !call.step_tensor && call.bias_correction;
  TORCH_CHECK_VALUE(!counts || (call.step >= 1 && call.step <= INT32_MAX), Call::name, ": step counts from 1, not ",
                    call.step);
}
}  // namespace apex
