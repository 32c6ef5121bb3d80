// The transducer joint, output[b, t, u] = f[b, t] + g[b, u] with ReLU and dropout: checks, launches, autograd.
#pragma once
#include "functional.h"
#include "host/transducer_joint.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "place.h"
#include "reference.h"
#include "status.h"
#include "zeroed_counters.h"

namespace apex {
namespace joint {
using Optional = std::optional<at::Tensor>;
using Pair = std::tuple<at::Tensor, at::Tensor>;
constexpr const char* op = "transducer_joint";

// Works with symbolic sizes.
inline void check_lengths(const at::Tensor& tensor, const at::Tensor& f_len, const at::Tensor& g_len,
                          const Optional& batch_offset) {
  const auto one = [&](const char* name, const at::Tensor& lengths) {
    TORCH_CHECK_TYPE(lengths.scalar_type() == at::kLong || lengths.scalar_type() == at::kInt, op, ": ", name,
                     " is int64 or int32, not ", lengths.scalar_type());
    TORCH_CHECK_VALUE(lengths.dim() == 1 && lengths.sym_size(0) == f_len.sym_size(0), op, ": ", name,
                      " has one element for each item of the batch, not the shape ", lengths.sym_sizes());
    TORCH_CHECK_VALUE(lengths.device() == tensor.device(), op, ": ", name, " is on ", lengths.device(), ", not on ",
                      tensor.device());
  };
  TORCH_CHECK_VALUE(f_len.dim() == 1, op, ": f_len has one element for each item of the batch, not the shape ",
                    f_len.sym_sizes());
  one("f_len", f_len);
  one("g_len", g_len);
  if (has_value(batch_offset)) one("batch_offset", *batch_offset);
}
inline void check(const at::Tensor& f, const at::Tensor& g, const at::Tensor& f_len, const at::Tensor& g_len,
                  const Optional& batch_offset, const c10::SymInt& packed_batch, double dropout, const Optional& seed) {
  element_type(op, f.scalar_type());
  TORCH_CHECK_TYPE(f.scalar_type() == g.scalar_type(), op, ": f and g must have one dtype, not ", f.scalar_type(),
                   " and ", g.scalar_type());
  TORCH_CHECK_VALUE(f.dim() == 3 && g.dim() == 3 && f.sym_size(0) == g.sym_size(0) && f.sym_size(2) == g.sym_size(2),
                    op, ": f [batch, frames, hidden] and g [batch, labels, hidden] do not fit: ", f.sym_sizes(), ", ",
                    g.sym_sizes());
  TORCH_CHECK_VALUE(f.device() == g.device(), op, ": f is on ", f.device(), " but g on ", g.device());
  check_lengths(f, f_len, g_len, batch_offset);
  TORCH_CHECK_VALUE(f_len.sym_size(0) == f.sym_size(0), op,
                    ": f_len has one element for each item of the batch, not the shape ", f_len.sym_sizes());
  TORCH_CHECK_VALUE(packed_batch >= 0, op, ": packed_batch must not be negative");
  TORCH_CHECK_VALUE(dropout >= 0 && dropout <= 1, op, ": dropout_prob must be between 0 and 1, not ", dropout);
  TORCH_CHECK_VALUE(dropout == 0 || (has_value(seed) && seed->scalar_type() == at::kLong && seed->sym_numel() == 1 &&
                                     seed->device() == f.device()),
                    op, ": dropout needs a seed, one int64 on ", f.device());
}
// A CPU can look before it leaps; elsewhere such an item is nan.
inline void check_items(const at::Tensor& f_len, const at::Tensor& g_len, const Optional& batch_offset, int64_t frames,
                        int64_t labels, int64_t rows) {
  if (!f_len.is_cpu()) return;
  const at::Tensor f = f_len.to(at::kLong).contiguous(), g = g_len.to(at::kLong).contiguous();
  const at::Tensor ends = has_value(batch_offset) ? batch_offset->to(at::kLong).contiguous() : at::Tensor();
  for (int64_t b = 0, end = 0; b < f.numel(); ++b) {
    const int64_t t = f.const_data_ptr<int64_t>()[b], u = g.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_VALUE(t >= 0 && t <= frames, op, ": f_len[", b, "] is ", t, ", but f has ", frames, " frames");
    TORCH_CHECK_VALUE(u >= 0 && u <= labels, op, ": g_len[", b, "] is ", u, ", but g has ", labels, " labels");
    if (!ends.defined()) continue;
    end += t * u;
    const int64_t given = ends.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_VALUE(given == end, op, ": batch_offset[", b, "] is ", given,
                      ", but the sum of f_len * g_len up to it is ", end);
    TORCH_CHECK_VALUE(end <= rows, op, ": packed_batch is ", rows, ", less than the ", end, " rows of the items");
  }
}

// [batch, frames, labels, columns], or packed: [packed_batch, columns].
inline c10::SymDimVector output_sizes(const c10::SymInt& batch, const c10::SymInt& frames, const c10::SymInt& labels,
                                      const c10::SymInt& columns, const Optional& batch_offset,
                                      const c10::SymInt& packed_batch) {
  if (has_value(batch_offset)) return {packed_batch, columns};
  return {batch, frames, labels, columns};
}
inline Pair outputs(const at::Tensor& f, const at::Tensor& g, const Optional& batch_offset,
                    const c10::SymInt& packed_batch, double dropout) {
  const auto sizes = [&](const c10::SymInt& columns) {
    return output_sizes(f.sym_size(0), f.sym_size(1), g.sym_size(1), columns, batch_offset, packed_batch);
  };
  const auto bytes = f.options().dtype(at::kByte);
  return {at::empty_symint(sizes(f.sym_size(2)), f.options()),
          dropout > 0 ? at::empty_symint(sizes((f.sym_size(2) + 7) / 8), bytes) : at::empty({0}, bytes)};
}
inline const gpu::u8* data(const at::Tensor& tensor) { return static_cast<const gpu::u8*>(tensor.const_data_ptr()); }
inline gpu::u8* mutable_data(const at::Tensor& tensor) { return static_cast<gpu::u8*>(tensor.mutable_data_ptr()); }

// The lengths as the kernels take them; they must live as long as the arguments.
struct Lengths {
  at::Tensor f_len, g_len, batch_offset;
  template <class Arguments> Lengths(const at::Tensor& f, const at::Tensor& g, const Optional& offset, Arguments* a)
      : f_len(f.contiguous()), g_len(g.contiguous()) {
    if (f.scalar_type() != g.scalar_type()) f_len = f_len.to(at::kLong), g_len = g_len.to(at::kLong);
    a->f_len = data(f_len), a->g_len = data(g_len), a->wide_lengths = f_len.scalar_type() == at::kLong;
    if (!has_value(offset)) return;
    // Of no items it still says that the output is packed.
    batch_offset =
        offset->numel() ? offset->to(at::kLong).contiguous() : at::zeros({1}, offset->options().dtype(at::kLong));
    a->batch_offset = data(batch_offset);
  }
};
inline double scale_of(double dropout) { return dropout < 1 ? 1 / (1 - dropout) : 0; }
}  // namespace joint

inline joint::Pair transducer_joint_forward(const at::Tensor& f, const at::Tensor& g, const at::Tensor& f_len,
                                            const at::Tensor& g_len, const joint::Optional& batch_offset,
                                            c10::SymInt packed_batch, bool relu, double dropout,
                                            const joint::Optional& seed) {
  joint::check(f, g, f_len, g_len, batch_offset, packed_batch, dropout, seed);
  const apex_place place = place_of(f.device());
  if (place.platform >= 0) {
    const int64_t rows =
        has_value(batch_offset) ? packed_batch.guard_int(__FILE__, __LINE__) : f.size(0) * f.size(1) * g.size(1);
    joint::check_items(f_len, g_len, batch_offset, f.size(1), g.size(1), rows);
    const at::Tensor x = f.contiguous(), y = g.contiguous();
    gpu::TransducerJointForward a{};
    const joint::Lengths lengths(f_len, g_len, batch_offset, &a);
    auto [output, mask] = joint::outputs(f, g, batch_offset, packed_batch, dropout);
    a.f = joint::data(x), a.g = joint::data(y), a.output = joint::mutable_data(output);
    if (dropout > 0) a.seed = joint::data(*seed), a.mask = joint::mutable_data(mask);
    a.batch = f.size(0), a.frames = f.size(1), a.labels = g.size(1), a.hidden = f.size(2), a.rows = rows;
    a.scale = joint::scale_of(dropout);
    a.keep = gpu::u32(std::lround((1 - dropout) * 65536));
    a.type = element_type(joint::op, f.scalar_type());
    a.relu = relu;
    if (!use_reference(apex_transducer_joint_forward(&place, &a), joint::op)) return {output, mask};
  }
  return call_reference<decltype(transducer_joint_forward)>("transducer_joint_forward", f, g, f_len, g_len,
                                                            batch_offset, packed_batch, relu, dropout, seed);
}

namespace joint {
inline void check_backward(const at::Tensor& grad_output, const Optional& f, const Optional& g, const Optional& mask,
                           const at::Tensor& f_len, const at::Tensor& g_len, const Optional& batch_offset,
                           const c10::SymInt& max_f_len, const c10::SymInt& max_g_len) {
  element_type(op, grad_output.scalar_type());
  check_lengths(grad_output, f_len, g_len, batch_offset);
  const c10::SymInt hidden = grad_output.sym_size(-1), batch = f_len.sym_size(0);
  const auto fits = [&](const at::Tensor& tensor, const c10::SymInt& columns) {
    const bool packed = has_value(batch_offset);
    return tensor.device() == grad_output.device() &&
           tensor.sym_sizes() == c10::SymIntArrayRef(output_sizes(batch, max_f_len, max_g_len, columns, batch_offset,
                                                                  packed ? grad_output.sym_size(0) : 0));
  };
  TORCH_CHECK_VALUE(grad_output.dim() == (has_value(batch_offset) ? 2 : 4) && fits(grad_output, hidden), op,
                    ": the gradient's shape ", grad_output.sym_sizes(), " is not the output's: ", batch, " items, ",
                    max_f_len, " frames, ", max_g_len, " labels");
  TORCH_CHECK_VALUE(!has_value(mask) || (mask->scalar_type() == at::kByte && fits(*mask, (hidden + 7) / 8)), op,
                    ": the mask is not the forward's");
  TORCH_CHECK_VALUE(has_value(f) == has_value(g), op, ": f goes with g");
  if (has_value(f))
    for (const auto& [tensor, size] : {std::pair{*f, max_f_len}, std::pair{*g, max_g_len}})
      TORCH_CHECK_VALUE(tensor.scalar_type() == grad_output.scalar_type() && tensor.device() == grad_output.device() &&
                            tensor.dim() == 3 && tensor.sym_size(0) == batch && tensor.sym_size(1) == size &&
                            tensor.sym_size(2) == hidden,
                        op, ": f or g is not the forward's: ", tensor.scalar_type(), " of shape ", tensor.sym_sizes());
}
}  // namespace joint

inline joint::Pair transducer_joint_backward(const at::Tensor& grad_output, const joint::Optional& f,
                                             const joint::Optional& g, const joint::Optional& mask,
                                             const at::Tensor& f_len, const at::Tensor& g_len,
                                             const joint::Optional& batch_offset, c10::SymInt max_f_len,
                                             c10::SymInt max_g_len, double scale) {
  joint::check_backward(grad_output, f, g, mask, f_len, g_len, batch_offset, max_f_len, max_g_len);
  const apex_place place = place_of(grad_output.device());
  if (place.platform >= 0) {
    gpu::TransducerJointBackward a{};
    a.batch = f_len.size(0), a.frames = max_f_len.guard_int(__FILE__, __LINE__),
    a.labels = max_g_len.guard_int(__FILE__, __LINE__), a.hidden = grad_output.size(-1);
    a.rows = has_value(batch_offset) ? grad_output.size(0) : a.batch * a.frames * a.labels;
    joint::check_items(f_len, g_len, batch_offset, a.frames, a.labels, a.rows);
    const joint::Lengths lengths(f_len, g_len, batch_offset, &a);
    const at::Tensor grad = grad_output.contiguous(), bits = has_value(mask) ? mask->contiguous() : at::Tensor();
    const at::Tensor x = has_value(f) ? f->contiguous() : at::Tensor(),
                     y = has_value(g) ? g->contiguous() : at::Tensor();
    const at::Tensor grad_f = at::empty({a.batch, a.frames, a.hidden}, grad.options()),
                     grad_g = at::empty({a.batch, a.labels, a.hidden}, grad.options());
    a.grad_output = joint::data(grad), a.grad_f = joint::mutable_data(grad_f), a.grad_g = joint::mutable_data(grad_g);
    if (bits.defined()) a.mask = joint::data(bits);
    else if (x.defined()) a.f = joint::data(x), a.g = joint::data(y);
    a.scale = scale;
    a.type = element_type(joint::op, grad.scalar_type());
    if (!use_reference(apex_transducer_joint_prepare(&place, &a), joint::op)) {
      at::Tensor partials;
      ZeroedCounters counters;
      if (a.splits > 1) {
        partials = at::empty({a.splits, a.batch, a.labels, a.hidden},
                             grad.options().dtype(a.type == APEX_F64 ? at::kDouble : at::kFloat));
        counters = ZeroedCounters(place, grad.device(), a.batch * a.hidden);
        a.partials = joint::mutable_data(partials), a.counters = reinterpret_cast<gpu::u8*>(counters.data());
      }
      if (!use_reference(apex_transducer_joint_backward(&place, &a), joint::op)) return {grad_f, grad_g};
    }
  }
  return call_reference<decltype(transducer_joint_backward)>("transducer_joint_backward", grad_output, f, g, mask,
                                                             f_len, g_len, batch_offset, max_f_len, max_g_len, scale);
}

inline joint::Pair transducer_joint_forward_meta(const at::Tensor& f, const at::Tensor& g, const at::Tensor& f_len,
                                                 const at::Tensor& g_len, const joint::Optional& batch_offset,
                                                 c10::SymInt packed_batch, bool, double dropout,
                                                 const joint::Optional& seed) {
  joint::check(f, g, f_len, g_len, batch_offset, packed_batch, dropout, seed);
  return joint::outputs(f, g, batch_offset, packed_batch, dropout);
}
inline joint::Pair transducer_joint_backward_meta(const at::Tensor& grad_output, const joint::Optional& f,
                                                  const joint::Optional& g, const joint::Optional& mask,
                                                  const at::Tensor& f_len, const at::Tensor& g_len,
                                                  const joint::Optional& batch_offset, c10::SymInt max_f_len,
                                                  c10::SymInt max_g_len, double) {
  joint::check_backward(grad_output, f, g, mask, f_len, g_len, batch_offset, max_f_len, max_g_len);
  const auto like = [&](const c10::SymInt& size) {
    return at::empty_symint(c10::SymDimVector{f_len.sym_size(0), size, grad_output.sym_size(-1)},
                            grad_output.options());
  };
  return {like(max_f_len), like(max_g_len)};
}

struct TransducerJointNode : Node {
  SavedVariable f, g, mask, f_len, g_len, batch_offset;
  c10::SymInt max_f_len, max_g_len;
  double scale = 1;

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    static const auto backward = dispatcher_op<decltype(transducer_joint_backward)>("apex::transducer_joint_backward");
    variable_list found(2);
    if (!grads[0].defined()) return found;
    const auto maybe = [](const SavedVariable& saved) {
      const at::Tensor tensor = saved.unpack();
      return tensor.defined() ? joint::Optional(tensor) : std::nullopt;
    };
    std::tie(found[0], found[1]) = backward.call(grads[0], maybe(f), maybe(g), maybe(mask), f_len.unpack(),
                                                 g_len.unpack(), maybe(batch_offset), max_f_len, max_g_len, scale);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&f, &g, &mask, &f_len, &g_len, &batch_offset}) s->reset_data();
  }
  std::string name() const override { return "ApexTransducerJointBackward"; }
};

inline joint::Pair transducer_joint_forward_autograd(c10::DispatchKeySet keys, const at::Tensor& f, const at::Tensor& g,
                                                     const at::Tensor& f_len, const at::Tensor& g_len,
                                                     const joint::Optional& batch_offset, c10::SymInt packed_batch,
                                                     bool relu, double dropout, const joint::Optional& seed) {
  static const auto forward = dispatcher_op<decltype(transducer_joint_forward)>("apex::transducer_joint_forward");
  refuse_forward_mode_of(joint::op, f, g);
  NodePointer<TransducerJointNode> node;
  if (records(f, g)) {
    node = make_node<TransducerJointNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(f, g));
    if (relu && dropout == 0) {
      node->f = SavedVariable(f, false);
      node->g = SavedVariable(g, false);
    }
    node->f_len = SavedVariable(f_len, false);
    node->g_len = SavedVariable(g_len, false);
    if (has_value(batch_offset)) node->batch_offset = SavedVariable(*batch_offset, false);
    node->max_f_len = f.sym_size(1);
    node->max_g_len = g.sym_size(1);
    node->scale = joint::scale_of(dropout);
  }
  joint::Pair made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward.redispatch(keys & c10::after_autograd_keyset, f, g, f_len, g_len, batch_offset, packed_batch, relu,
                              dropout, seed);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(made), node);
    if (dropout > 0) node->mask = SavedVariable(std::get<1>(made), false);
  }
  return made;
}
inline joint::Pair transducer_joint_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_output,
                                                      const joint::Optional& f, const joint::Optional& g,
                                                      const joint::Optional& mask, const at::Tensor& f_len,
                                                      const at::Tensor& g_len, const joint::Optional& batch_offset,
                                                      c10::SymInt max_f_len, c10::SymInt max_g_len, double scale) {
  static const auto backward = dispatcher_op<decltype(transducer_joint_backward)>("apex::transducer_joint_backward");
  refuse_forward_mode(joint::op, grad_output);
  joint::Pair made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return backward.redispatch(keys & c10::after_autograd_keyset, grad_output, f, g, mask, f_len, g_len, batch_offset,
                               max_f_len, max_g_len, scale);
  }();
  if (records(grad_output)) {
    const auto node = no_double_backward(joint::op, "is not implemented", grad_output);
    torch::autograd::set_history(std::get<0>(made), node);
    torch::autograd::set_history(std::get<1>(made), node);
  }
  return made;
}
// As torch's addition: of two dtypes, the wider one.
inline joint::Pair transducer_joint_forward_autocast(const at::Tensor& f, const at::Tensor& g, const at::Tensor& f_len,
                                                     const at::Tensor& g_len, const joint::Optional& batch_offset,
                                                     c10::SymInt packed_batch, bool relu, double dropout,
                                                     const joint::Optional& seed) {
  static const auto forward = dispatcher_op<decltype(transducer_joint_forward)>("apex::transducer_joint_forward");
  const auto guard = without_autocast();
  const at::ScalarType type = c10::promoteTypes(f.scalar_type(), g.scalar_type());
  return forward.call(f.to(type), g.to(type), f_len, g_len, batch_offset, packed_batch, relu, dropout, seed);
}
}  // namespace apex

APEX_FUNCTIONAL_OP(transducer_joint_forward)
APEX_FUNCTIONAL_OP(transducer_joint_backward)
APEX_AUTOCAST_OP(transducer_joint_forward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(transducer_joint, m) {
  m.def(
      "transducer_joint",
      [](const at::Tensor& f, const at::Tensor& g, const at::Tensor& f_len, const at::Tensor& g_len,
         const std::optional<at::Tensor>& batch_offset, int64_t packed_batch, bool relu, double dropout,
         const std::optional<at::Tensor>& seed) {
        using Forward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                           const at::Tensor&, const std::optional<at::Tensor>&,
                                                           c10::SymInt, bool, double, const std::optional<at::Tensor>&);
        static const auto forward = apex::dispatcher_op<Forward>("apex::transducer_joint_forward");
        return forward.call(f, g, f_len, g_len, batch_offset, packed_batch, relu, dropout, seed);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
