// Softmax cross entropy with label smoothing: checks, outputs, launches.
#pragma once
#include "generated/xentropy.h"
#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>

namespace apex {
namespace cross_entropy {
inline void check(const at::Tensor& logits, const at::Tensor& labels, double smoothing) {
  check_classes("xentropy", logits, "labels", labels);
  TORCH_CHECK_VALUE(smoothing >= 0 && smoothing <= 1, "xentropy: smoothing must be between 0 and 1, not ", smoothing);
}

// The logits as rows that lie at even distances: a view where their strides allow it (a slice of a padded vocabulary).
inline at::Tensor rows_of(const at::Tensor& logits) {
  if (logits.is_contiguous()) return logits;
  const bool rows = logits.dim() == 2 && logits.stride(1) == 1 && logits.stride(0) >= logits.size(1);
  return rows ? logits : logits.contiguous();
}
inline int64_t row_stride(const at::Tensor& rows) { return rows.is_contiguous() ? rows.size(-1) : rows.stride(0); }

template <class Arguments, class Call>
Arguments arguments(const Call& call, const at::Tensor& rows, const at::Tensor& labels) {
  Arguments a{};
  a.logits = bytes(rows), a.labels = bytes(labels);
  a.rows = labels.numel(), a.classes = rows.size(-1), a.row_stride = row_stride(rows);
  a.padding_index = call.padding_idx.value_or(0);
  a.has_padding = call.padding_idx.has_value();
  a.smoothing = call.smoothing;
  a.logits_type = element_type("xentropy", rows.scalar_type());
  a.wide_labels = labels.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE(a.classes > 0 || a.rows == 0, "xentropy: logits have no classes: their shape is ", rows.sizes());
  return a;
}
}  // namespace cross_entropy
namespace ce = cross_entropy;

inline void XentropyForward::check() const { ce::check(logits, labels, smoothing); }
inline XentropyForward::Result XentropyForward::outputs() const {
  const at::ScalarType math = math_type(logits);
  return {at::empty_symint(labels.sym_sizes(), logits.options().dtype(half_to_float ? math : logits.scalar_type())),
          at::empty_symint(with_last(labels.sym_sizes(), 2), logits.options().dtype(math))};
}
inline bool XentropyForward::launch(const apex_place& place, Result& made) const {
  const at::Tensor rows = ce::rows_of(logits), indices = labels.contiguous();
  auto a = ce::arguments<gpu::XentropyForward>(*this, rows, indices);
  made = outputs();
  const auto& [losses, normalizers] = made;
  a.losses = mutable_bytes(losses), a.normalizers = mutable_bytes(normalizers);
  a.loss_type = element_type(unit, losses.scalar_type());
  return run_with_workspace(&apex_xentropy_forward, place, a, unit, rows.device());
}

inline void XentropyBackward::check() const {
  ce::check(logits, labels, smoothing);
  check_like(unit, "the gradient", grad_losses, labels.sym_sizes(), std::nullopt, "the labels' ");
  check_like(unit, "normalizers", normalizers, with_last(labels.sym_sizes(), 2), math_type(logits), "the forward's ");
}

inline at::Tensor XentropyBackward::outputs() const { return at::empty_symint(logits.sym_sizes(), logits.options()); }
inline bool XentropyBackward::launch(const apex_place& place, Result& made) const {
  const at::Tensor rows = ce::rows_of(logits), indices = labels.contiguous(), saved = normalizers.contiguous();
  auto a = ce::arguments<gpu::XentropyBackward>(*this, rows, indices);
  // What sum() and mean() hand back is one value for all rows.
  const bool same = is_one_value(grad_losses);
  const at::Tensor grad = same ? grad_losses : grad_losses.contiguous();
  made = outputs();
  a.grad_losses = bytes(grad), a.grad_stride = same ? 0 : 1, a.grad_type = element_type(unit, grad.scalar_type());
  a.normalizers = bytes(saved), a.grad_logits = mutable_bytes(made);
  return !use_reference(apex_xentropy_backward(&place, &a), unit);
}
inline at::Tensor XentropyBackward::formula() const {
  const at::ScalarType math = math_type(logits);
  const int64_t classes = logits.size(-1);
  at::Tensor ignored = labels == gpu::xentropy_ignored_label;
  if (padding_idx) ignored = ignored.logical_or(labels == *padding_idx);
  const at::Tensor outside = (labels < 0).logical_or(labels >= classes).logical_and(ignored.logical_not());
  const at::Tensor index = labels.to(at::kLong).clamp(0, classes - 1).unsqueeze(-1);
  const at::Tensor one_hot = at::zeros_like(logits, logits.options().dtype(math)).scatter(-1, index, 1 - smoothing);
  const at::Tensor g = grad_losses.to(math).masked_fill(outside, std::numeric_limits<double>::quiet_NaN());
  const at::Tensor gradient =
      g.unsqueeze(-1) * (at::softmax(logits.to(math), -1) - smoothing / double(classes) - one_hot);
  return gradient.masked_fill(ignored.unsqueeze(-1), 0).to(logits.scalar_type());
}
}  // namespace apex
