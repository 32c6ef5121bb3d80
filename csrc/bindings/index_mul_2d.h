// index_mul_2d, out[i] = in1[index[i]] * in2[i]: checks, outputs, launches, and the gradient of the gradient.
#pragma once
#include "generated/index_mul_2d.h"
#include "checks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace apex {
namespace index_mul {
// `second` has the shape of the product.
inline void check(const at::Tensor& in1, const at::Tensor& second, const at::Tensor& index) {
  element_type("index_mul_2d", in1.scalar_type());
  TORCH_CHECK_TYPE(in1.scalar_type() == second.scalar_type(), "index_mul_2d: tensors must have one dtype, not ",
                   in1.scalar_type(), " and ", second.scalar_type());
  check_integers("index_mul_2d", "idx1", index);
  TORCH_CHECK_VALUE(in1.dim() == 2 && second.dim() == 2 && index.dim() == 1 && in1.sym_size(1) == second.sym_size(1) &&
                        second.sym_size(0) == index.sym_size(0),
                    "index_mul_2d: in1 [entries, features], in2 [rows, features] and idx1 [rows] do not fit: ",
                    in1.sym_sizes(), ", ", second.sym_sizes(), ", ", index.sym_sizes());
}
// False: the reference must.
inline bool gather(const apex_place& place, const at::Tensor& from, const at::Tensor& factor, const at::Tensor& index,
                   at::Tensor* out) {
  const at::Tensor a = from.contiguous(), b = factor.contiguous(), i = index.contiguous();
  *out = at::empty(b.sizes(), b.options());
  gpu::IndexMul2d call{};
  call.a = bytes(a), call.b = bytes(b), call.out = mutable_bytes(*out), call.index = bytes(i);
  call.rows = b.size(0), call.entries = a.size(0), call.features = b.size(1);
  call.type = element_type("index_mul_2d", a.scalar_type());
  call.wide_index = i.scalar_type() == at::kLong;
  return !use_reference(apex_index_mul_2d_forward(&place, &call), "index_mul_2d");
}
// Rows by their index, in their own order among equals, and where those of each entry begin. Rows whose index is
// outside [0, entries) are before the first or behind the last, if they are there.
struct Grouped { at::Tensor rows, begins; };
inline Grouped group_sorted(const at::Tensor& index, int64_t entries) {
  const auto [sorted, order] = at::sort(index, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  return {order.contiguous(), at::searchsorted(sorted, at::arange(entries + 1, index.options())).contiguous()};
}
// On a CPU they are counted instead.
inline Grouped group_counted(const at::Tensor& index, int64_t entries) {
  Grouped made{at::empty_like(index), at::zeros({entries + 1}, index.options())};
  const int64_t count = index.size(0), *of = index.const_data_ptr<int64_t>();
  int64_t *rows = made.rows.mutable_data_ptr<int64_t>(), *begins = made.begins.mutable_data_ptr<int64_t>();
  const auto inside = [entries](int64_t entry) { return entry >= 0 && entry < entries; };
  for (int64_t i = 0; i < count; ++i)
    if (inside(of[i])) ++begins[of[i] + 1];
  for (int64_t e = 0; e < entries; ++e) begins[e + 1] += begins[e];
  for (int64_t i = 0; i < count; ++i)
    if (inside(of[i])) rows[begins[of[i]]++] = i;
  std::copy_backward(begins, begins + entries, begins + entries + 1);  // each is where the next one begins now
  begins[0] = 0;
  return made;
}
inline bool scatter(const apex_place& place, const at::Tensor& first, const at::Tensor& second, const at::Tensor& index,
                    int64_t entries, at::Tensor* out) {
  const at::Tensor a = first.contiguous(), b = second.contiguous(), i = index.to(at::kLong).contiguous();
  const auto [rows, begins] = i.is_cpu() ? group_counted(i, entries) : group_sorted(i, entries);
  *out = at::empty({entries, a.size(1)}, a.options());
  gpu::IndexMul2d call{};
  call.a = bytes(a), call.b = bytes(b), call.out = mutable_bytes(*out), call.order = bytes(rows),
  call.begins = bytes(begins);
  call.rows = a.size(0), call.entries = entries, call.features = a.size(1);
  call.type = element_type("index_mul_2d", a.scalar_type());
  return !use_reference(apex_index_mul_2d_scatter(&place, &call), "index_mul_2d");
}
}  // namespace index_mul

inline void IndexMul2dForward::check() const { index_mul::check(in1, in2, idx1); }
inline at::Tensor IndexMul2dForward::outputs() const { return at::empty_symint(in2.sym_sizes(), in2.options()); }
inline bool IndexMul2dForward::launch(const apex_place& place, Result& made) const {
  return index_mul::gather(place, in1, in2, idx1, &made);
}

inline void IndexMul2dBackward::check() const {
  index_mul::check(in1, in2, idx1);
  index_mul::check(in1, grad_out, idx1);
}
inline IndexMul2dBackward::Result IndexMul2dBackward::outputs() const {
  return {gradient_like(in1, of_in1, in1), gradient_like(in2, of_in2, in2)};
}
inline bool IndexMul2dBackward::launch(const apex_place& place, Result& made) const {
  at::Tensor first = no_elements(in1), second = first;
  if (of_in2 && !index_mul::gather(place, in1, grad_out, idx1, &second)) return false;
  if (of_in1 && !index_mul::scatter(place, grad_out, in2, idx1, in1.size(0), &first)) return false;
  made = {first, second};
  return true;
}

namespace index_mul {
// Gradients of (grad_out, in1, in2) from those of the two gradients: products and sums of the same two kinds.
struct BackwardNode : OpNode<BackwardNode> {
  static constexpr const char* shown = "ApexIndexMul2dBackwardBackward";
  SavedVariable grad_out, in1, in2, index;
  auto kept() { return std::tie(grad_out, in1, in2, index); }
  bool gives(size_t input, const variable_list& given) const {
    const bool first = given[0].defined(), second = given[1].defined();
    return input == 0 ? first || second : input == 1 ? second : first;
  }

  variable_list gradients(const variable_list& grads) {
    const auto& product = dispatcher_op<IndexMul2dForward>();
    const auto& gradients = dispatcher_op<IndexMul2dBackward>();
    variable_list found(3);
    const at::Tensor g = grad_out.unpack(), a = in1.unpack(), b = in2.unpack(), i = index.unpack();
    const at::Tensor &of_first = grads[0], &of_second = grads[1];
    if (wants(0)) {
      if (of_first.defined()) found[0] = product.call(of_first, b, i);
      if (of_second.defined())
        found[0] = found[0].defined() ? found[0] + product.call(a, of_second, i) : product.call(a, of_second, i);
    }
    if (wants(1) && of_second.defined()) found[1] = std::get<0>(gradients.call(g, a, of_second, i, true, false));
    if (wants(2) && of_first.defined()) found[2] = product.call(of_first, g, i);
    return found;
  }
};
}  // namespace index_mul

inline IndexMul2dBackward::Result IndexMul2dBackward::autograd(c10::DispatchKeySet keys) const {
  Result made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return dispatcher_op<IndexMul2dBackward>().redispatch(keys & c10::after_autograd_keyset, grad_out, in1, in2, idx1,
                                                          of_in1, of_in2);
  }();
  if (!records(grad_out, in1, in2)) return made;
  const auto node = make_node<index_mul::BackwardNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(grad_out, in1, in2));
  node->grad_out = keep(grad_out), node->in1 = keep(in1), node->in2 = keep(in2), node->index = keep(idx1);
  set_history_of(made, node);
  return made;
}
}  // namespace apex
