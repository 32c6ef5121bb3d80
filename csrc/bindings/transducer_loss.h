// The transducer (RNN-T) loss: checks, outputs, launches.
#pragma once
#include "generated/transducer_loss.h"
#include "transducer_lengths.h"

#include <ATen/ops/empty.h>

namespace apex {
namespace transducer {
constexpr const char* op = "transducer_loss";

inline void check(const at::Tensor& x, const at::Tensor& label, const at::Tensor& f_len, const at::Tensor& y_len,
                  int64_t blank_idx, const OptionalTensor& batch_offset, const c10::SymInt& max_f_len) {
  element_type(op, x.scalar_type());
  check_integers(op, "label", label);
  TORCH_CHECK_VALUE(label.dim() == 2, op, ": label is [batch, labels], not of shape ", label.sym_sizes());
  check_lengths(op, f_len, "y_len", y_len, batch_offset, label.sym_size(0));
  if (has_value(batch_offset)) {
    TORCH_CHECK_VALUE(x.dim() == 2, op, ": packed x is [rows, classes], not of shape ", x.sym_sizes());
    TORCH_CHECK_VALUE(max_f_len >= 0, op, ": max_f_len must not be negative");
  } else {
    TORCH_CHECK_VALUE(x.dim() == 4 && x.sym_size(0) == label.sym_size(0) && x.sym_size(2) == label.sym_size(1) + 1, op,
                      ": x [batch, frames, labels + 1, classes] and label [batch, labels] do not fit: ", x.sym_sizes(),
                      ", ", label.sym_sizes());
  }
  TORCH_CHECK_VALUE(blank_idx >= 0 && x.sym_size(-1) > blank_idx, op, ": blank_idx is ", blank_idx,
                    ", outside the classes of x of shape ", x.sym_sizes());
}
inline c10::SymInt frames_of(const at::Tensor& x, const OptionalTensor& batch_offset, const c10::SymInt& max_f_len) {
  return has_value(batch_offset) ? max_f_len : x.sym_size(1);
}

// The shape of normalizers.
inline c10::SymDimVector of_rows(const at::Tensor& x) { return with_last(x.sym_sizes().slice(0, x.dim() - 1), 2); }
// Tensors as the kernels take them; they must live as long as the arguments.
template <class Arguments> struct Call {
  at::Tensor x, label;
  Arguments a{};
  Lengths lengths;
  template <class Op> Call(const Op& op_, int64_t frames)
      : x(op_.x.contiguous()), label(op_.label.contiguous()), lengths(op_.f_len, op_.y_len, op_.batch_offset, &a) {
    a.x = bytes(x), a.label = bytes(label);
    a.batch = label.size(0), a.frames = frames, a.labels = label.size(1) + 1, a.classes = x.size(-1),
    a.blank = op_.blank_idx;
    a.rows = a.batch_offset ? x.size(0) : a.batch * a.frames * a.labels;
    a.type = element_type(op, x.scalar_type());
    a.wide_labels = label.scalar_type() == at::kLong;
  }
};
}  // namespace transducer
namespace tr = transducer;

inline void TransducerLossForward::check() const {
  tr::check(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len);
}
inline TransducerLossForward::Result TransducerLossForward::outputs() const {
  const auto math = x.options().dtype(math_type(x));
  const c10::SymDimVector nodes{label.sym_size(0), tr::frames_of(x, batch_offset, max_f_len), label.sym_size(1) + 1, 2};
  return {at::empty_symint({label.sym_size(0)}, half_to_float ? math : x.options()), at::empty_symint(nodes, math),
          at::empty_symint(nodes, math),
          log_probs ? no_elements(x, math_type(x)) : at::empty_symint(tr::of_rows(x), math)};
}
inline bool TransducerLossForward::launch(const apex_place& place, Result& made) const {
  const int64_t frames = tr::frames_of(x, batch_offset, max_f_len).guard_int(__FILE__, __LINE__);
  tr::Call<gpu::TransducerLossForward> call(*this, frames);
  made = outputs();
  const auto& [loss, alpha, beta, normalizers] = made;
  auto& a = call.a;
  a.alpha = mutable_bytes(alpha), a.beta = mutable_bytes(beta), a.loss = mutable_bytes(loss);
  if (!log_probs) a.normalizers = mutable_bytes(normalizers);
  a.loss_type = element_type(unit, loss.scalar_type());
  return run_with_workspace(&apex_transducer_loss_forward, place, a, unit, x.device());
}

inline void TransducerLossBackward::check() const {
  constexpr const char* op = unit;
  TORCH_CHECK_VALUE(alpha.dim() == 4 && beta.dim() == 4, op, ": alpha and beta are not the forward's");
  tr::check(x, label, f_len, y_len, blank_idx, batch_offset, alpha.sym_size(1));
  const c10::SymDimVector nodes{label.sym_size(0), tr::frames_of(x, batch_offset, alpha.sym_size(1)),
                                label.sym_size(1) + 1, 2};
  check_like(op, "alpha", alpha, nodes, math_type(x), "the forward's ");
  check_like(op, "beta", beta, nodes, math_type(x), "the forward's ");
  check_like(op, "the gradient", grad_loss, c10::SymDimVector{label.sym_size(0)}, std::nullopt, "one for each item, ");
  if (!has_value(normalizers)) return;
  TORCH_CHECK_VALUE(of_logits, op, ": with normalizers the gradient is that of logits");
  check_like(op, "normalizers", *normalizers, tr::of_rows(x), math_type(x), "the forward's ");
}
inline at::Tensor TransducerLossBackward::outputs() const { return at::empty_symint(x.sym_sizes(), x.options()); }
inline bool TransducerLossBackward::launch(const apex_place& place, Result& made) const {
  tr::Call<gpu::TransducerLossBackward> call(*this, alpha.size(1));
  // What sum() and mean() hand back is one value for all items.
  const bool same = is_one_value(grad_loss);
  const at::Tensor grad = same ? grad_loss : grad_loss.contiguous(), forward = alpha.contiguous(),
                   onward = beta.contiguous(), sums = contiguous(normalizers);
  made = outputs();
  auto& a = call.a;
  a.grad_loss = bytes(grad), a.grad_stride = same ? 0 : 1, a.grad_type = element_type(unit, grad.scalar_type());
  a.alpha = bytes(forward), a.beta = bytes(onward), a.grad_x = mutable_bytes(made), a.normalizers = bytes(sums);
  a.of_logits = of_logits;
  return !use_reference(apex_transducer_loss_backward(&place, &a), unit);
}
}  // namespace apex
