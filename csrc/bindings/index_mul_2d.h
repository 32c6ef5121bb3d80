// index_mul_2d, out[i] = in1[index[i]] * in2[i]: checks, launches, autograd to any order.
#pragma once
#include "functional.h"
#include "host/index_mul_2d.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros_like.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
namespace index_mul {
using Pair = std::tuple<at::Tensor, at::Tensor>;

// Works with symbolic sizes. `second` has the shape of the product.
inline void check(const at::Tensor& in1, const at::Tensor& second, const at::Tensor& index) {
  element_type("index_mul_2d", in1.scalar_type());
  TORCH_CHECK_TYPE(in1.scalar_type() == second.scalar_type(), "index_mul_2d: tensors must have one dtype, not ",
                   in1.scalar_type(), " and ", second.scalar_type());
  TORCH_CHECK_TYPE(index.scalar_type() == at::kLong || index.scalar_type() == at::kInt,
                   "index_mul_2d: idx1 is int64 or int32, not ", index.scalar_type());
  TORCH_CHECK_VALUE(in1.dim() == 2 && second.dim() == 2 && index.dim() == 1 && in1.sym_size(1) == second.sym_size(1) &&
                        second.sym_size(0) == index.sym_size(0),
                    "index_mul_2d: in1 [entries, features], in2 [rows, features] and idx1 [rows] do not fit: ",
                    in1.sym_sizes(), ", ", second.sym_sizes(), ", ", index.sym_sizes());
  TORCH_CHECK_VALUE(in1.device() == second.device() && in1.device() == index.device(), "index_mul_2d: tensors are on ",
                    in1.device(), ", ", second.device(), " and ", index.device());
}
// A CPU can look before it leaps; elsewhere such rows give nan.
inline void check_index(const at::Tensor& index, int64_t entries) {
  if (!index.is_cpu()) return;
  const auto each = [&](const auto* values) {
    for (int64_t i = 0; i < index.numel(); ++i)
      TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < entries, "index_mul_2d: idx1[", i, "] is ", values[i],
                        ", outside [0, ", entries, ")");
  };
  if (index.scalar_type() == at::kLong) each(index.const_data_ptr<int64_t>());
  else each(index.const_data_ptr<int32_t>());
}
inline const gpu::u8* bytes(const at::Tensor& tensor) { return static_cast<const gpu::u8*>(tensor.const_data_ptr()); }
inline gpu::u8* mutable_bytes(const at::Tensor& tensor) { return static_cast<gpu::u8*>(tensor.mutable_data_ptr()); }

// False: the reference must.
inline bool gather(const apex_place& place, const at::Tensor& from, const at::Tensor& factor, const at::Tensor& index,
                   at::Tensor* out) {
  const at::Tensor a = from.contiguous(), b = factor.contiguous(), i = index.contiguous();
  check_index(i, a.size(0));
  *out = at::empty(b.sizes(), b.options());
  gpu::IndexMul2d call{};
  call.a = bytes(a), call.b = bytes(b), call.out = mutable_bytes(*out), call.index = bytes(i);
  call.rows = b.size(0), call.entries = a.size(0), call.features = b.size(1);
  call.type = element_type("index_mul_2d", a.scalar_type());
  call.wide_index = i.scalar_type() == at::kLong;
  return !use_reference(apex_index_mul_2d_forward(&place, &call), "index_mul_2d");
}
inline bool scatter(const apex_place& place, const at::Tensor& first, const at::Tensor& second, const at::Tensor& index,
                    int64_t entries, at::Tensor* out) {
  const at::Tensor a = first.contiguous(), b = second.contiguous(), i = index.to(at::kLong);
  const auto [sorted, order] = at::sort(i, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor begins = at::searchsorted(sorted, at::arange(entries + 1, i.options())).contiguous(),
                   rows = order.contiguous();
  *out = at::empty({entries, a.size(1)}, a.options());
  gpu::IndexMul2d call{};
  call.a = bytes(a), call.b = bytes(b), call.out = mutable_bytes(*out), call.order = bytes(rows),
  call.begins = bytes(begins);
  call.rows = a.size(0), call.entries = entries, call.features = a.size(1);
  call.type = element_type("index_mul_2d", a.scalar_type());
  return !use_reference(apex_index_mul_2d_scatter(&place, &call), "index_mul_2d");
}
}  // namespace index_mul

inline at::Tensor index_mul_2d_forward(const at::Tensor& in1, const at::Tensor& in2, const at::Tensor& idx1) {
  index_mul::check(in1, in2, idx1);
  const apex_place place = place_of(in1.device());
  at::Tensor out;
  if (place.platform >= 0 && index_mul::gather(place, in1, in2, idx1, &out)) return out;
  return call_reference<decltype(index_mul_2d_forward)>("index_mul_2d_forward", in1, in2, idx1);
}
inline index_mul::Pair index_mul_2d_backward(const at::Tensor& grad_out, const at::Tensor& in1, const at::Tensor& in2,
                                             const at::Tensor& idx1, bool of_in1, bool of_in2) {
  index_mul::check(in1, in2, idx1);
  index_mul::check(in1, grad_out, idx1);
  const apex_place place = place_of(in1.device());
  if (place.platform >= 0) {
    const at::Tensor nothing = at::empty({0}, in1.options());
    at::Tensor first = nothing, second = nothing;
    if ((!of_in2 || index_mul::gather(place, in1, grad_out, idx1, &second)) &&
        (!of_in1 || index_mul::scatter(place, grad_out, in2, idx1, in1.size(0), &first)))
      return {first, second};
  }
  return call_reference<decltype(index_mul_2d_backward)>("index_mul_2d_backward", grad_out, in1, in2, idx1, of_in1,
                                                         of_in2);
}
inline at::Tensor index_mul_2d_forward_meta(const at::Tensor& in1, const at::Tensor& in2, const at::Tensor& idx1) {
  index_mul::check(in1, in2, idx1);
  return at::empty_symint(in2.sym_sizes(), in2.options());
}
inline index_mul::Pair index_mul_2d_backward_meta(const at::Tensor& grad_out, const at::Tensor& in1,
                                                  const at::Tensor& in2, const at::Tensor& idx1, bool of_in1,
                                                  bool of_in2) {
  index_mul::check(in1, in2, idx1);
  index_mul::check(in1, grad_out, idx1);
  const auto like = [](const at::Tensor& tensor, bool wanted) {
    return wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options()) : at::empty({0}, tensor.options());
  };
  return {like(in1, of_in1), like(in2, of_in2)};
}

namespace index_mul {
inline at::Tensor product(const at::Tensor& in1, const at::Tensor& in2, const at::Tensor& index) {
  static const auto forward = dispatcher_op<decltype(index_mul_2d_forward)>("apex::index_mul_2d_forward");
  return forward.call(in1, in2, index);
}
inline Pair gradients(const at::Tensor& grad_out, const at::Tensor& in1, const at::Tensor& in2, const at::Tensor& index,
                      bool of_in1, bool of_in2) {
  static const auto backward = dispatcher_op<decltype(index_mul_2d_backward)>("apex::index_mul_2d_backward");
  return backward.call(grad_out, in1, in2, index, of_in1, of_in2);
}

// Gradients of (in1, in2) from that of the product.
struct ForwardNode : Node {
  SavedVariable in1, in2, index;

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list found(2);
    if (!grads[0].defined()) return found;
    const bool first = task_should_compute_output(0), second = task_should_compute_output(1);
    const Pair made = gradients(grads[0], in1.unpack(), in2.unpack(), index.unpack(), first, second);
    if (first) found[0] = std::get<0>(made);
    if (second) found[1] = std::get<1>(made);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&in1, &in2, &index}) s->reset_data();
  }
  std::string name() const override { return "ApexIndexMul2dBackward"; }
};

// Gradients of (grad_out, in1, in2) from those of the two gradients: products and sums of the same two kinds.
struct BackwardNode : Node {
  SavedVariable grad_out, in1, in2, index;

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list found(3);
    const at::Tensor g = grad_out.unpack(), a = in1.unpack(), b = in2.unpack(), i = index.unpack();
    const at::Tensor &of_first = grads[0], &of_second = grads[1];
    if (task_should_compute_output(0)) {
      if (of_first.defined()) found[0] = product(of_first, b, i);
      if (of_second.defined())
        found[0] = found[0].defined() ? found[0] + product(a, of_second, i) : product(a, of_second, i);
    }
    if (task_should_compute_output(1) && of_second.defined())
      found[1] = std::get<0>(gradients(g, a, of_second, i, true, false));
    if (task_should_compute_output(2) && of_first.defined()) found[2] = product(of_first, g, i);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&grad_out, &in1, &in2, &index}) s->reset_data();
  }
  std::string name() const override { return "ApexIndexMul2dBackwardBackward"; }
};
}  // namespace index_mul

inline at::Tensor index_mul_2d_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& in1, const at::Tensor& in2,
                                                const at::Tensor& idx1) {
  static const auto forward = dispatcher_op<decltype(index_mul_2d_forward)>("apex::index_mul_2d_forward");
  refuse_forward_mode_of("index_mul_2d", in1, in2);
  NodePointer<index_mul::ForwardNode> node;
  if (records(in1, in2)) {
    node = make_node<index_mul::ForwardNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(in1, in2));
    node->in1 = SavedVariable(in1, false);
    node->in2 = SavedVariable(in2, false);
    node->index = SavedVariable(idx1, false);
  }
  at::Tensor out = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward.redispatch(keys & c10::after_autograd_keyset, in1, in2, idx1);
  }();
  if (node) torch::autograd::set_history(out, node);
  return out;
}
inline index_mul::Pair index_mul_2d_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_out,
                                                      const at::Tensor& in1, const at::Tensor& in2,
                                                      const at::Tensor& idx1, bool of_in1, bool of_in2) {
  static const auto backward = dispatcher_op<decltype(index_mul_2d_backward)>("apex::index_mul_2d_backward");
  refuse_forward_mode_of("index_mul_2d", grad_out, in1, in2);
  NodePointer<index_mul::BackwardNode> node;
  if (records(grad_out, in1, in2)) {
    node = make_node<index_mul::BackwardNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(grad_out, in1, in2));
    node->grad_out = SavedVariable(grad_out, false);
    node->in1 = SavedVariable(in1, false);
    node->in2 = SavedVariable(in2, false);
    node->index = SavedVariable(idx1, false);
  }
  index_mul::Pair made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return backward.redispatch(keys & c10::after_autograd_keyset, grad_out, in1, in2, idx1, of_in1, of_in2);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(made), node);
    torch::autograd::set_history(std::get<1>(made), node);
  }
  return made;
}
}  // namespace apex

// No autocast rule: the product has the factors' dtype.
APEX_FUNCTIONAL_OP(index_mul_2d_forward)
APEX_FUNCTIONAL_OP(index_mul_2d_backward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(index_mul_2d, m) {
  m.def(
      "index_mul_2d",
      [](const at::Tensor& in1, const at::Tensor& in2, const at::Tensor& idx1) {
        static const auto forward =
            apex::dispatcher_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
                "apex::index_mul_2d_forward");
        return forward.call(in1, in2, idx1);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
