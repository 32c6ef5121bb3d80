// The transducer (RNN-T) loss: checks, launches, autograd.
#pragma once
#include "functional.h"
#include "host/transducer_loss.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
namespace transducer {
using Optional = std::optional<at::Tensor>;
using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
constexpr const char* op = "transducer_loss";

inline at::ScalarType math_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}
inline bool is_index(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}

// Works with symbolic sizes.
inline void check(const at::Tensor& x, const at::Tensor& label, const at::Tensor& f_len, const at::Tensor& y_len,
                  int64_t blank_idx, const Optional& batch_offset, const c10::SymInt& max_f_len) {
  element_type(op, x.scalar_type());
  TORCH_CHECK_TYPE(is_index(label), op, ": label is int64 or int32, not ", label.scalar_type());
  TORCH_CHECK_VALUE(label.dim() == 2, op, ": label is [batch, labels], not of shape ", label.sym_sizes());
  const auto length = [&](const char* name, const at::Tensor& lengths) {
    TORCH_CHECK_TYPE(is_index(lengths), op, ": ", name, " is int64 or int32, not ", lengths.scalar_type());
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
                        const Optional& batch_offset, int64_t frames) {
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
inline c10::SymInt frames_of(const at::Tensor& x, const Optional& batch_offset, const c10::SymInt& max_f_len) {
  return has_value(batch_offset) ? max_f_len : x.sym_size(1);
}

// The shape of normalizers.
inline c10::SymDimVector of_rows(const at::Tensor& x) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end() - 1);
  sizes.emplace_back(2);
  return sizes;
}
// loss, alpha, beta, normalizers
inline Outputs outputs(const at::Tensor& x, const at::Tensor& label, const Optional& batch_offset,
                       const c10::SymInt& max_f_len, bool log_probs, bool half_to_float) {
  const auto math = x.options().dtype(math_type(x));
  const c10::SymDimVector nodes{label.sym_size(0), frames_of(x, batch_offset, max_f_len), label.sym_size(1) + 1, 2};
  return {at::empty_symint({label.sym_size(0)}, half_to_float ? math : x.options()), at::empty_symint(nodes, math),
          at::empty_symint(nodes, math), log_probs ? at::empty({0}, math) : at::empty_symint(of_rows(x), math)};
}
inline const gpu::u8* data(const at::Tensor& tensor) { return static_cast<const gpu::u8*>(tensor.const_data_ptr()); }
inline gpu::u8* mutable_data(const at::Tensor& tensor) { return static_cast<gpu::u8*>(tensor.mutable_data_ptr()); }

// Tensors as the kernels take them; they must live as long as the arguments.
template <class Arguments> struct Call {
  at::Tensor x, label, f_len, y_len, batch_offset;
  Arguments a{};
  Call(const at::Tensor& x_, const at::Tensor& label_, const at::Tensor& f_len_, const at::Tensor& y_len_,
       int64_t blank_idx, const Optional& offset, int64_t frames)
      : x(x_.contiguous()), label(label_.contiguous()), f_len(f_len_.contiguous()), y_len(y_len_.contiguous()) {
    if (f_len.scalar_type() != y_len.scalar_type()) f_len = f_len.to(at::kLong), y_len = y_len.to(at::kLong);
    if (has_value(offset)) {
      // Of no items it still says that x is packed.
      batch_offset =
          offset->numel() ? offset->to(at::kLong).contiguous() : at::zeros({1}, offset->options().dtype(at::kLong));
      a.batch_offset = data(batch_offset);
    }
    a.x = data(x), a.label = data(label), a.f_len = data(f_len), a.g_len = data(y_len);
    a.batch = label.size(0), a.frames = frames, a.labels = label.size(1) + 1, a.classes = x.size(-1),
    a.blank = blank_idx;
    a.rows = batch_offset.defined() ? x.size(0) : a.batch * a.frames * a.labels;
    a.type = element_type(op, x.scalar_type());
    a.wide_labels = label.scalar_type() == at::kLong;
    a.wide_lengths = f_len.scalar_type() == at::kLong;
  }
};
}  // namespace transducer

inline transducer::Outputs transducer_loss_forward(const at::Tensor& x, const at::Tensor& label,
                                                   const at::Tensor& f_len, const at::Tensor& y_len, int64_t blank_idx,
                                                   const transducer::Optional& batch_offset, c10::SymInt max_f_len,
                                                   bool log_probs, bool half_to_float) {
  namespace tr = transducer;
  tr::check(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len);
  const apex_place place = place_of(x.device());
  if (place.platform >= 0) {
    const int64_t frames = tr::frames_of(x, batch_offset, max_f_len).guard_int(__FILE__, __LINE__);
    tr::check_items(x, label, f_len, y_len, batch_offset, frames);
    tr::Call<gpu::TransducerLossForward> call(x, label, f_len, y_len, blank_idx, batch_offset, frames);
    auto [loss, alpha, beta, normalizers] = tr::outputs(x, label, batch_offset, max_f_len, log_probs, half_to_float);
    auto& a = call.a;
    const at::Tensor emissions = at::empty({a.batch, a.frames + a.labels - 1, a.labels, 2}, alpha.options());
    a.emissions = tr::mutable_data(emissions), a.alpha = tr::mutable_data(alpha), a.beta = tr::mutable_data(beta),
    a.loss = tr::mutable_data(loss);
    if (!log_probs) a.normalizers = tr::mutable_data(normalizers);
    a.loss_type = element_type(tr::op, loss.scalar_type());
    if (!use_reference(apex_transducer_loss_forward(&place, &a), tr::op)) return {loss, alpha, beta, normalizers};
  }
  return call_reference<decltype(transducer_loss_forward)>("transducer_loss_forward", x, label, f_len, y_len, blank_idx,
                                                           batch_offset, max_f_len, log_probs, half_to_float);
}

namespace transducer {
inline void check_backward(const at::Tensor& grad_loss, const at::Tensor& x, const at::Tensor& label,
                           const at::Tensor& f_len, const at::Tensor& y_len, const at::Tensor& alpha,
                           const at::Tensor& beta, const Optional& normalizers, int64_t blank_idx,
                           const Optional& batch_offset, bool of_logits) {
  TORCH_CHECK_VALUE(alpha.dim() == 4 && beta.dim() == 4, op, ": alpha and beta are not the forward's");
  check(x, label, f_len, y_len, blank_idx, batch_offset, alpha.sym_size(1));
  const c10::SymDimVector nodes{label.sym_size(0), frames_of(x, batch_offset, alpha.sym_size(1)), label.sym_size(1) + 1,
                                2};
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
  TORCH_CHECK_VALUE(normalizers->sym_sizes() == c10::SymIntArrayRef(of_rows(x)) &&
                        normalizers->scalar_type() == math_type(x) && normalizers->device() == x.device(),
                    op, ": normalizers are two ", math_type(x), " for each row of x, as the forward gives them");
}
}  // namespace transducer

inline at::Tensor transducer_loss_backward(const at::Tensor& grad_loss, const at::Tensor& x, const at::Tensor& label,
                                           const at::Tensor& f_len, const at::Tensor& y_len, const at::Tensor& alpha,
                                           const at::Tensor& beta, const transducer::Optional& normalizers,
                                           int64_t blank_idx, const transducer::Optional& batch_offset,
                                           bool of_logits) {
  namespace tr = transducer;
  tr::check_backward(grad_loss, x, label, f_len, y_len, alpha, beta, normalizers, blank_idx, batch_offset, of_logits);
  const apex_place place = place_of(x.device());
  if (place.platform >= 0) {
    tr::check_items(x, label, f_len, y_len, batch_offset, alpha.size(1));
    tr::Call<gpu::TransducerLossBackward> call(x, label, f_len, y_len, blank_idx, batch_offset, alpha.size(1));
    // What sum() and mean() hand back is one value for all items.
    const bool same = grad_loss.stride(0) == 0 || grad_loss.size(0) == 1;
    const at::Tensor grad = same ? grad_loss : grad_loss.contiguous(), forward = alpha.contiguous(),
                     onward = beta.contiguous();
    const at::Tensor sums = has_value(normalizers) ? normalizers->contiguous() : at::Tensor(),
                     gradient = at::empty(x.sizes(), x.options());
    auto& a = call.a;
    a.grad_loss = tr::data(grad), a.grad_stride = same ? 0 : 1, a.grad_type = element_type(tr::op, grad.scalar_type());
    a.alpha = tr::data(forward), a.beta = tr::data(onward), a.grad_x = tr::mutable_data(gradient);
    if (sums.defined()) a.normalizers = tr::data(sums);
    a.of_logits = of_logits;
    if (!use_reference(apex_transducer_loss_backward(&place, &a), tr::op)) return gradient;
  }
  return call_reference<decltype(transducer_loss_backward)>("transducer_loss_backward", grad_loss, x, label, f_len,
                                                            y_len, alpha, beta, normalizers, blank_idx, batch_offset,
                                                            of_logits);
}

inline transducer::Outputs transducer_loss_forward_meta(const at::Tensor& x, const at::Tensor& label,
                                                        const at::Tensor& f_len, const at::Tensor& y_len,
                                                        int64_t blank_idx, const transducer::Optional& batch_offset,
                                                        c10::SymInt max_f_len, bool log_probs, bool half_to_float) {
  transducer::check(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len);
  return transducer::outputs(x, label, batch_offset, max_f_len, log_probs, half_to_float);
}
inline at::Tensor transducer_loss_backward_meta(const at::Tensor& grad_loss, const at::Tensor& x,
                                                const at::Tensor& label, const at::Tensor& f_len,
                                                const at::Tensor& y_len, const at::Tensor& alpha,
                                                const at::Tensor& beta, const transducer::Optional& normalizers,
                                                int64_t blank_idx, const transducer::Optional& batch_offset,
                                                bool of_logits) {
  transducer::check_backward(grad_loss, x, label, f_len, y_len, alpha, beta, normalizers, blank_idx, batch_offset,
                             of_logits);
  return at::empty_symint(x.sym_sizes(), x.options());
}

struct TransducerLossNode : Node {
  SavedVariable x, label, f_len, y_len, alpha, beta, normalizers, batch_offset;
  int64_t blank_idx = 0;
  bool of_logits = true;

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    static const auto backward = dispatcher_op<decltype(transducer_loss_backward)>("apex::transducer_loss_backward");
    variable_list found(1);
    if (!grads[0].defined() || !task_should_compute_output(0)) return found;
    const auto maybe = [](const SavedVariable& saved) {
      const at::Tensor tensor = saved.unpack();
      return tensor.defined() ? transducer::Optional(tensor) : std::nullopt;
    };
    found[0] = backward.call(grads[0], x.unpack(), label.unpack(), f_len.unpack(), y_len.unpack(), alpha.unpack(),
                             beta.unpack(), maybe(normalizers), blank_idx, maybe(batch_offset), of_logits);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&x, &label, &f_len, &y_len, &alpha, &beta, &normalizers, &batch_offset}) s->reset_data();
  }
  std::string name() const override { return "ApexTransducerLossBackward"; }
};

inline transducer::Outputs transducer_loss_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& x,
                                                            const at::Tensor& label, const at::Tensor& f_len,
                                                            const at::Tensor& y_len, int64_t blank_idx,
                                                            const transducer::Optional& batch_offset,
                                                            c10::SymInt max_f_len, bool log_probs, bool half_to_float) {
  static const auto forward = dispatcher_op<decltype(transducer_loss_forward)>("apex::transducer_loss_forward");
  refuse_forward_mode(transducer::op, x);
  NodePointer<TransducerLossNode> node;
  if (records(x)) {
    node = make_node<TransducerLossNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    node->x = SavedVariable(x, false);
    node->label = SavedVariable(label, false);
    node->f_len = SavedVariable(f_len, false);
    node->y_len = SavedVariable(y_len, false);
    if (has_value(batch_offset)) node->batch_offset = SavedVariable(*batch_offset, false);
    node->blank_idx = blank_idx;
    node->of_logits = !log_probs;
  }
  transducer::Outputs made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward.redispatch(keys & c10::after_autograd_keyset, x, label, f_len, y_len, blank_idx, batch_offset,
                              max_f_len, log_probs, half_to_float);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(made), node);
    node->alpha = SavedVariable(std::get<1>(made), false);
    node->beta = SavedVariable(std::get<2>(made), false);
    if (!log_probs) node->normalizers = SavedVariable(std::get<3>(made), false);
  }
  return made;
}
inline at::Tensor transducer_loss_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_loss,
                                                    const at::Tensor& x, const at::Tensor& label,
                                                    const at::Tensor& f_len, const at::Tensor& y_len,
                                                    const at::Tensor& alpha, const at::Tensor& beta,
                                                    const transducer::Optional& normalizers, int64_t blank_idx,
                                                    const transducer::Optional& batch_offset, bool of_logits) {
  static const auto backward = dispatcher_op<decltype(transducer_loss_backward)>("apex::transducer_loss_backward");
  refuse_forward_mode_of(transducer::op, grad_loss, x);
  at::Tensor gradient = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return backward.redispatch(keys & c10::after_autograd_keyset, grad_loss, x, label, f_len, y_len, alpha, beta,
                               normalizers, blank_idx, batch_offset, of_logits);
  }();
  if (records(grad_loss, x))
    torch::autograd::set_history(gradient, no_double_backward(transducer::op, "is not implemented", grad_loss, x));
  return gradient;
}
// As torch's losses, float32 under autocast; x is read as it is.
inline transducer::Outputs transducer_loss_forward_autocast(const at::Tensor& x, const at::Tensor& label,
                                                            const at::Tensor& f_len, const at::Tensor& y_len,
                                                            int64_t blank_idx, const transducer::Optional& batch_offset,
                                                            c10::SymInt max_f_len, bool log_probs, bool) {
  static const auto forward = dispatcher_op<decltype(transducer_loss_forward)>("apex::transducer_loss_forward");
  const auto guard = without_autocast();
  return forward.call(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len, log_probs, true);
}
}  // namespace apex

APEX_FUNCTIONAL_OP(transducer_loss_forward)
APEX_FUNCTIONAL_OP(transducer_loss_backward)
APEX_AUTOCAST_OP(transducer_loss_forward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(transducer_loss, m) {
  m.def(
      "transducer_loss",
      [](const at::Tensor& x, const at::Tensor& label, const at::Tensor& f_len, const at::Tensor& y_len,
         int64_t blank_idx, const std::optional<at::Tensor>& batch_offset, int64_t max_f_len, bool log_probs,
         bool half_to_float) {
        using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
            const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t,
            const std::optional<at::Tensor>&, c10::SymInt, bool, bool);
        static const auto forward = apex::dispatcher_op<Forward>("apex::transducer_loss_forward");
        const auto [loss, alpha, beta, normalizers] =
            forward.call(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len, log_probs, half_to_float);
        return std::tuple(loss, alpha, beta);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
