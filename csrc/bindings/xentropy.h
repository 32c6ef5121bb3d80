// Softmax cross entropy with label smoothing: checks, launches, autograd.
#pragma once
#include "functional.h"
#include "host/xentropy.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
namespace cross_entropy {
inline at::ScalarType math_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }
inline at::ScalarType loss_type(at::ScalarType logits, bool half_to_float) {
  return half_to_float ? math_type(logits) : logits;
}

// Works with symbolic sizes.
inline void check(const at::Tensor& logits, const at::Tensor& labels, double smoothing) {
  element_type("xentropy", logits.scalar_type());
  TORCH_CHECK_VALUE(logits.dim() >= 1 && labels.sym_sizes() == logits.sym_sizes().slice(0, logits.dim() - 1),
                    "xentropy: logits of shape ", logits.sym_sizes(),
                    " need labels of the same shape without the last dimension, not ", labels.sym_sizes());
  TORCH_CHECK_TYPE(labels.scalar_type() == at::kLong || labels.scalar_type() == at::kInt,
                   "xentropy: labels are int64 or int32, not ", labels.scalar_type());
  TORCH_CHECK_VALUE(labels.device() == logits.device(), "xentropy: logits are on ", logits.device(), " but labels on ",
                    labels.device());
  TORCH_CHECK_VALUE(smoothing >= 0 && smoothing <= 1, "xentropy: smoothing must be between 0 and 1, not ", smoothing);
}

// A CPU can look before it leaps; elsewhere such labels give nan.
inline void check_labels(const at::Tensor& labels, int64_t classes, std::optional<int64_t> padding_idx) {
  if (!labels.is_cpu()) return;
  const auto each = [&](const auto* label) {
    for (int64_t i = 0; i < labels.numel(); ++i) {
      const int64_t value = label[i];
      TORCH_CHECK_INDEX((value >= 0 && value < classes) || value == gpu::xentropy_ignored_label || value == padding_idx,
                        "xentropy: label ", value, " is outside [0, ", classes, "), and neither padding_idx nor -100");
    }
  };
  if (labels.scalar_type() == at::kLong) each(labels.const_data_ptr<int64_t>());
  else each(labels.const_data_ptr<int32_t>());
}

// The logits as rows that lie at even distances: a view where their strides allow it (a slice of a padded vocabulary).
inline at::Tensor rows_of(const at::Tensor& logits) {
  if (logits.is_contiguous()) return logits;
  const bool rows = logits.dim() == 2 && logits.stride(1) == 1 && logits.stride(0) >= logits.size(1);
  return rows ? logits : logits.contiguous();
}
inline int64_t row_stride(const at::Tensor& rows) { return rows.is_contiguous() ? rows.size(-1) : rows.stride(0); }

template <class Arguments>
Arguments arguments(const at::Tensor& rows, const at::Tensor& labels, double smoothing,
                    std::optional<int64_t> padding_idx) {
  Arguments a{};
  a.logits = static_cast<const gpu::u8*>(rows.const_data_ptr());
  a.labels = static_cast<const gpu::u8*>(labels.const_data_ptr());
  a.rows = labels.numel();
  a.classes = rows.size(-1);
  a.row_stride = row_stride(rows);
  a.padding_index = padding_idx.value_or(0);
  a.has_padding = padding_idx.has_value();
  a.smoothing = smoothing;
  a.logits_type = element_type("xentropy", rows.scalar_type());
  a.wide_labels = labels.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE(a.classes > 0 || a.rows == 0, "xentropy: logits have no classes: their shape is ", rows.sizes());
  check_labels(labels, a.classes, padding_idx);
  return a;
}

inline c10::SymDimVector normalizer_sizes(const at::Tensor& labels) {
  c10::SymDimVector sizes(labels.sym_sizes().begin(), labels.sym_sizes().end());
  sizes.push_back(2);
  return sizes;
}
inline std::tuple<at::Tensor, at::Tensor> outputs(const at::Tensor& logits, const at::Tensor& labels,
                                                  bool half_to_float) {
  const at::ScalarType type = logits.scalar_type();
  return {at::empty_symint(labels.sym_sizes(), logits.options().dtype(loss_type(type, half_to_float))),
          at::empty_symint(normalizer_sizes(labels), logits.options().dtype(math_type(type)))};
}

inline void check_backward(const at::Tensor& grad_losses, const at::Tensor& logits, const at::Tensor& labels,
                           const at::Tensor& normalizers, double smoothing) {
  check(logits, labels, smoothing);
  TORCH_CHECK_VALUE(grad_losses.sym_sizes() == labels.sym_sizes() && grad_losses.device() == logits.device(),
                    "xentropy: the gradient of the losses must have their shape ", labels.sym_sizes(),
                    " and device, not ", grad_losses.sym_sizes());
  TORCH_CHECK_VALUE(normalizers.sym_sizes() == c10::SymIntArrayRef(normalizer_sizes(labels)) &&
                        normalizers.scalar_type() == math_type(logits.scalar_type()) &&
                        normalizers.device() == logits.device(),
                    "xentropy: normalizers are two ", math_type(logits.scalar_type()), " for each label, on ",
                    logits.device(), ", as the forward gives them");
}

// The same gradient by torch's differentiable ops: what double backward differentiates.
inline at::Tensor differentiable_backward(const at::Tensor& grad_losses, const at::Tensor& logits,
                                          const at::Tensor& labels, double smoothing,
                                          std::optional<int64_t> padding_idx) {
  const at::ScalarType math = math_type(logits.scalar_type());
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
}  // namespace cross_entropy

inline std::tuple<at::Tensor, at::Tensor> xentropy_forward(const at::Tensor& logits, const at::Tensor& labels,
                                                           double smoothing, std::optional<int64_t> padding_idx,
                                                           bool half_to_float) {
  namespace ce = cross_entropy;
  ce::check(logits, labels, smoothing);
  const apex_place place = place_of(logits.device());
  if (place.platform >= 0) {
    const at::Tensor rows = ce::rows_of(logits), indices = labels.contiguous();
    auto a = ce::arguments<gpu::XentropyForward>(rows, indices, smoothing, padding_idx);
    auto [losses, normalizers] = ce::outputs(logits, labels, half_to_float);
    a.losses = static_cast<gpu::u8*>(losses.mutable_data_ptr());
    a.normalizers = static_cast<gpu::u8*>(normalizers.mutable_data_ptr());
    a.loss_type = element_type("xentropy", losses.scalar_type());
    if (!use_reference(apex_xentropy_prepare(&place, &a), "xentropy")) {
      at::Tensor partials;
      if (a.splits > 1) {
        partials = at::empty({a.rows, a.splits, 3}, normalizers.options());
        a.partials = static_cast<gpu::u8*>(partials.mutable_data_ptr());
      }
      if (!use_reference(apex_xentropy_forward(&place, &a), "xentropy")) return {losses, normalizers};
    }
  }
  return call_reference<decltype(xentropy_forward)>("xentropy_forward", logits, labels, smoothing, padding_idx,
                                                    half_to_float);
}
inline at::Tensor xentropy_backward(const at::Tensor& grad_losses, const at::Tensor& logits, const at::Tensor& labels,
                                    const at::Tensor& normalizers, double smoothing,
                                    std::optional<int64_t> padding_idx) {
  namespace ce = cross_entropy;
  ce::check_backward(grad_losses, logits, labels, normalizers, smoothing);
  const apex_place place = place_of(logits.device());
  if (place.platform >= 0) {
    const at::Tensor rows = ce::rows_of(logits), indices = labels.contiguous(), saved = normalizers.contiguous();
    auto a = ce::arguments<gpu::XentropyBackward>(rows, indices, smoothing, padding_idx);
    // What sum() and mean() hand back is one value for all rows.
    bool same = true;
    for (int64_t d = 0; d < grad_losses.dim(); ++d)
      same = same && (grad_losses.stride(d) == 0 || grad_losses.size(d) == 1);
    const at::Tensor grad = same ? grad_losses : grad_losses.contiguous();
    const at::Tensor gradient = at::empty(logits.sizes(), logits.options());
    a.grad_losses = static_cast<const gpu::u8*>(grad.const_data_ptr());
    a.grad_stride = same ? 0 : 1;
    a.grad_type = element_type("xentropy", grad.scalar_type());
    a.normalizers = static_cast<const gpu::u8*>(saved.const_data_ptr());
    a.grad_logits = static_cast<gpu::u8*>(gradient.mutable_data_ptr());
    if (!use_reference(apex_xentropy_backward(&place, &a), "xentropy")) return gradient;
  }
  return call_reference<decltype(xentropy_backward)>("xentropy_backward", grad_losses, logits, labels, normalizers,
                                                     smoothing, padding_idx);
}

inline std::tuple<at::Tensor, at::Tensor> xentropy_forward_meta(const at::Tensor& logits, const at::Tensor& labels,
                                                                double smoothing, std::optional<int64_t> padding_idx,
                                                                bool half_to_float) {
  cross_entropy::check(logits, labels, smoothing);
  return cross_entropy::outputs(logits, labels, half_to_float);
}
inline at::Tensor xentropy_backward_meta(const at::Tensor& grad_losses, const at::Tensor& logits,
                                         const at::Tensor& labels, const at::Tensor& normalizers, double smoothing,
                                         std::optional<int64_t> padding_idx) {
  cross_entropy::check_backward(grad_losses, logits, labels, normalizers, smoothing);
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

struct XentropyNode : Node {
  SavedVariable logits, labels, normalizers;
  double smoothing = 0;
  std::optional<int64_t> padding_idx;

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);
    static const auto backward = dispatcher_op<decltype(xentropy_backward)>("apex::xentropy_backward");
    variable_list found(1);
    if (gradients[0].defined() && task_should_compute_output(0))
      found[0] =
          backward.call(gradients[0], logits.unpack(), labels.unpack(), normalizers.unpack(), smoothing, padding_idx);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&logits, &labels, &normalizers}) s->reset_data();
  }
  std::string name() const override { return "ApexXentropyBackward"; }
};

inline std::tuple<at::Tensor, at::Tensor> xentropy_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& logits,
                                                                    const at::Tensor& labels, double smoothing,
                                                                    std::optional<int64_t> padding_idx,
                                                                    bool half_to_float) {
  static const auto forward = dispatcher_op<decltype(xentropy_forward)>("apex::xentropy_forward");
  refuse_forward_mode("xentropy", logits);
  NodePointer<XentropyNode> node;
  if (records(logits)) {
    node = make_node<XentropyNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(logits));
    node->smoothing = smoothing;
    node->padding_idx = padding_idx;
    node->logits = SavedVariable(logits, false);
    node->labels = SavedVariable(labels, false);
  }
  auto made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward.redispatch(keys & c10::after_autograd_keyset, logits, labels, smoothing, padding_idx, half_to_float);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(made), node);
    node->normalizers = SavedVariable(std::get<1>(made), false);
  }
  return made;
}
inline at::Tensor xentropy_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_losses,
                                             const at::Tensor& logits, const at::Tensor& labels,
                                             const at::Tensor& normalizers, double smoothing,
                                             std::optional<int64_t> padding_idx) {
  static const auto backward = dispatcher_op<decltype(xentropy_backward)>("apex::xentropy_backward");
  refuse_forward_mode_of("xentropy", grad_losses, logits);
  if (records(grad_losses, logits))
    return cross_entropy::differentiable_backward(grad_losses, logits, labels, smoothing, padding_idx);
  at::AutoDispatchBelowADInplaceOrView guard;
  return backward.redispatch(keys & c10::after_autograd_keyset, grad_losses, logits, labels, normalizers, smoothing,
                             padding_idx);
}
// As torch's cross_entropy, the losses are float32 under autocast; logits are read as they are.
inline std::tuple<at::Tensor, at::Tensor> xentropy_forward_autocast(const at::Tensor& logits, const at::Tensor& labels,
                                                                    double smoothing,
                                                                    std::optional<int64_t> padding_idx, bool) {
  static const auto forward = dispatcher_op<decltype(xentropy_forward)>("apex::xentropy_forward");
  const auto guard = without_autocast();
  return forward.call(logits, labels, smoothing, padding_idx, true);
}
}  // namespace apex

APEX_FUNCTIONAL_OP(xentropy_forward)
APEX_FUNCTIONAL_OP(xentropy_backward)
APEX_AUTOCAST_OP(xentropy_forward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
// The losses alone, past torch.ops: for eager calls.
APEX_PYTHON_OP(xentropy, m) {
  m.def(
      "xentropy",
      [](const at::Tensor& logits, const at::Tensor& labels, double smoothing, std::optional<int64_t> padding_idx,
         bool half_to_float) {
        static const auto forward = apex::dispatcher_op<std::tuple<at::Tensor, at::Tensor>(
            const at::Tensor&, const at::Tensor&, double, std::optional<int64_t>, bool)>("apex::xentropy_forward");
        return std::get<0>(forward.call(logits, labels, smoothing, padding_idx, half_to_float));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
