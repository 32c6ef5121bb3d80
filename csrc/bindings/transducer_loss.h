// The transducer (RNN-T) loss: checks, outputs, launches.
#pragma once
#include "generated/transducer_loss.h"
#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace apex {
namespace transducer {
constexpr const char* op = "transducer_loss";

inline void check(const at::Tensor& x, const at::Tensor& label, const at::Tensor& f_len, const at::Tensor& y_len,
                  int64_t blank_idx, const OptionalTensor& batch_offset, const c10::SymInt& max_f_len) {
  element_type(op, x.scalar_type());
  check_integers(op, "label", label);
  TORCH_CHECK_VALUE(label.dim() == 2, op, ": label is [batch, labels], not of shape ", label.sym_sizes());
  const auto length = [&](const char* name, const at::Tensor& lengths) {
    check_integers(op, name, lengths);
    TORCH_CHECK_VALUE(lengths.dim() == 1 && lengths.sym_size(0) == label.sym_size(0), op, ": ", name,
                      " has one element for each item of the batch, not the shape ", lengths.sym_sizes());
    TORCH_CHECK_VALUE(lengths.device() == x.device(), op, ": ", name, " is on ", lengths.device(), ", x on ",
                      x.device());
  };
  length("f_len", f_len);
  length("y_len", y_len);
  TORCH_CHECK_VALUE(label.device() == x.device(), op, ": label is on ", label.device(), ", x on ", x.device());
  if (has_value(batch_offset)) {
    length("batch_offset", *batch_offset);
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
// A CPU can look before it leaps; elsewhere such an item is nan.
inline void check_items(const at::Tensor& x, const at::Tensor& label, const at::Tensor& f_len, const at::Tensor& y_len,
                        const OptionalTensor& batch_offset, int64_t frames) {
  if (!f_len.is_cpu()) return;
  const at::Tensor f = f_len.to(at::kLong).contiguous(), y = y_len.to(at::kLong).contiguous(),
                   labels = label.to(at::kLong).contiguous();
  const at::Tensor ends = has_value(batch_offset) ? batch_offset->to(at::kLong).contiguous() : at::Tensor();
  for (int64_t b = 0, end = 0; b < f.numel(); ++b) {
    const int64_t t = f.const_data_ptr<int64_t>()[b], u = y.const_data_ptr<int64_t>()[b], most = label.size(1);
    TORCH_CHECK_VALUE(t >= 1 && t <= frames, op, ": f_len[", b, "] is ", t, ", outside [1, ", frames,
                      "]: an item has at least one frame");
    TORCH_CHECK_VALUE(u >= 0 && u <= most, op, ": y_len[", b, "] is ", u, ", but label has ", most, " columns");
    for (int64_t i = 0; i < u; ++i) {
      const int64_t value = labels.const_data_ptr<int64_t>()[b * most + i];
      TORCH_CHECK_INDEX(value >= 0 && value < x.size(-1), op, ": label[", b, ", ", i, "] is ", value, ", outside [0, ",
                        x.size(-1), ")");
    }
    if (!ends.defined()) continue;
    end += t * (u + 1);
    const int64_t given = ends.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_VALUE(given == end, op, ": batch_offset[", b, "] is ", given,
                      ", but the sum of f_len * (y_len + 1) up to it is ", end);
    TORCH_CHECK_VALUE(end <= x.size(0), op, ": packed x has ", x.size(0), " rows, less than the ", end,
                      " of the items");
  }
}
inline c10::SymInt frames_of(const at::Tensor& x, const OptionalTensor& batch_offset, const c10::SymInt& max_f_len) {
  return has_value(batch_offset) ? max_f_len : x.sym_size(1);
}

// The shape of normalizers.
inline c10::SymDimVector of_rows(const at::Tensor& x) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end() - 1);
  sizes.emplace_back(2);
  return sizes;
}
// Tensors as the kernels take them; they must live as long as the arguments.
template <class Arguments> struct Call {
  at::Tensor x, label, f_len, y_len, batch_offset;
  Arguments a{};
  template <class Op> Call(const Op& op_, int64_t frames)
      : x(op_.x.contiguous()), label(op_.label.contiguous()), f_len(op_.f_len.contiguous()),
        y_len(op_.y_len.contiguous()) {
    const OptionalTensor& offset = op_.batch_offset;
    if (f_len.scalar_type() != y_len.scalar_type()) f_len = f_len.to(at::kLong), y_len = y_len.to(at::kLong);
    if (has_value(offset)) {
      // Of no items it still says that x is packed.
      batch_offset =
          offset->numel() ? offset->to(at::kLong).contiguous() : at::zeros({1}, offset->options().dtype(at::kLong));
      a.batch_offset = bytes(batch_offset);
    }
    a.x = bytes(x), a.label = bytes(label), a.f_len = bytes(f_len), a.g_len = bytes(y_len);
    a.batch = label.size(0), a.frames = frames, a.labels = label.size(1) + 1, a.classes = x.size(-1),
    a.blank = op_.blank_idx;
    a.rows = batch_offset.defined() ? x.size(0) : a.batch * a.frames * a.labels;
    a.type = element_type(op, x.scalar_type());
    a.wide_labels = label.scalar_type() == at::kLong;
    a.wide_lengths = f_len.scalar_type() == at::kLong;
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
          at::empty_symint(nodes, math), log_probs ? at::empty({0}, math) : at::empty_symint(tr::of_rows(x), math)};
}
inline bool TransducerLossForward::launch(const apex_place& place, Result& made) const {
  const int64_t frames = tr::frames_of(x, batch_offset, max_f_len).guard_int(__FILE__, __LINE__);
  tr::check_items(x, label, f_len, y_len, batch_offset, frames);
  tr::Call<gpu::TransducerLossForward> call(*this, frames);
  made = outputs();
  const auto& [loss, alpha, beta, normalizers] = made;
  auto& a = call.a;
  const at::Tensor emissions = at::empty({a.batch, a.frames + a.labels - 1, a.labels, 2}, alpha.options());
  a.emissions = mutable_bytes(emissions), a.alpha = mutable_bytes(alpha), a.beta = mutable_bytes(beta);
  a.loss = mutable_bytes(loss);
  if (!log_probs) a.normalizers = mutable_bytes(normalizers);
  a.loss_type = element_type(unit, loss.scalar_type());
  return !use_reference(apex_transducer_loss_forward(&place, &a), unit);
}

inline void TransducerLossBackward::check() const {
  constexpr const char* op = unit;
  TORCH_CHECK_VALUE(alpha.dim() == 4 && beta.dim() == 4, op, ": alpha and beta are not the forward's");
  tr::check(x, label, f_len, y_len, blank_idx, batch_offset, alpha.sym_size(1));
  const c10::SymDimVector nodes{label.sym_size(0), tr::frames_of(x, batch_offset, alpha.sym_size(1)),
                                label.sym_size(1) + 1, 2};
  for (const at::Tensor& tensor : {alpha, beta})
    TORCH_CHECK_VALUE(tensor.sym_sizes() == c10::SymIntArrayRef(nodes) && tensor.scalar_type() == math_type(x) &&
                          tensor.device() == x.device(),
                      op, ": alpha and beta are ", math_type(x), " of shape ", c10::SymIntArrayRef(nodes),
                      ", as the forward gives them");
  TORCH_CHECK_VALUE(
      grad_loss.dim() == 1 && grad_loss.sym_size(0) == label.sym_size(0) && grad_loss.device() == x.device(), op,
      ": the gradient of the losses has one element for each item, not the shape ", grad_loss.sym_sizes());
  if (!has_value(normalizers)) return;
  TORCH_CHECK_VALUE(of_logits, op, ": with normalizers the gradient is that of logits");
  TORCH_CHECK_VALUE(normalizers->sym_sizes() == c10::SymIntArrayRef(tr::of_rows(x)) &&
                        normalizers->scalar_type() == math_type(x) && normalizers->device() == x.device(),
                    op, ": normalizers are two ", math_type(x), " for each row of x, as the forward gives them");
}
inline at::Tensor TransducerLossBackward::outputs() const { return at::empty_symint(x.sym_sizes(), x.options()); }
inline bool TransducerLossBackward::launch(const apex_place& place, Result& made) const {
  tr::check_items(x, label, f_len, y_len, batch_offset, alpha.size(1));
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
