// Group norm, with SiLU after it or without: checks, layouts, launches, autograd.
#pragma once
#include "functional.h"
#include "host/group_norm.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
namespace group_norm {
using OptionalTensor = std::optional<at::Tensor>;
constexpr const char* name = "group_norm";

inline at::ScalarType math_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// Throws unless shapes, dtypes and devices fit. Works with symbolic sizes.
inline void check(const at::Tensor& input, int64_t groups, const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "group_norm: the input has ", input.dim(),
                    " dimensions; it must have at least 2, batch and channels");
  element_type(name, input.scalar_type());
  TORCH_CHECK_VALUE(groups >= 1, "group_norm: num_groups must be at least 1, not ", groups);
  TORCH_CHECK_VALUE(input.sym_size(1) % groups == 0, "group_norm: ", input.sym_size(1),
                    " channels cannot be parted into ", groups, " groups");
  for (const OptionalTensor* w : {&weight, &bias}) {
    if (!has_value(*w)) continue;
    const char* what = w == &weight ? "weight" : "bias";
    TORCH_CHECK_VALUE((*w)->dim() == 1 && (*w)->sym_size(0) == input.sym_size(1), "group_norm: ", what, " has shape ",
                      (*w)->sym_sizes(), " but the input has ", input.sym_size(1), " channels");
    TORCH_CHECK_VALUE((*w)->device() == input.device(), "group_norm: ", what, " is on ", (*w)->device(),
                      " but the input is on ", input.device());
    element_type(name, (*w)->scalar_type());
    TORCH_CHECK_TYPE(((*w)->scalar_type() == at::kDouble) == (input.scalar_type() == at::kDouble),
                     "group_norm: float64 goes with float64 alone: the input is ", input.scalar_type(), ", the ", what,
                     " ", (*w)->scalar_type());
  }
  TORCH_CHECK_TYPE(!has_value(weight) || !has_value(bias) || weight->scalar_type() == bias->scalar_type(),
                   "group_norm: weight and bias must have one dtype");
}

// How kernels read a tensor, and how outputs lie in memory.
enum class Layout { contiguous, channels_last_1d, channels_last, channels_last_3d };
inline Layout layout_of(const at::Tensor& input) {
  if (input.is_contiguous()) return Layout::contiguous;
  if (input.dim() == 3 && input.transpose(1, 2).is_contiguous()) return Layout::channels_last_1d;
  if (input.dim() == 4 && input.is_contiguous(at::MemoryFormat::ChannelsLast)) return Layout::channels_last;
  if (input.dim() == 5 && input.is_contiguous(at::MemoryFormat::ChannelsLast3d)) return Layout::channels_last_3d;
  return Layout::contiguous;
}
inline at::MemoryFormat format_of(Layout layout) {
  return layout == Layout::channels_last      ? at::MemoryFormat::ChannelsLast
         : layout == Layout::channels_last_3d ? at::MemoryFormat::ChannelsLast3d
                                              : at::MemoryFormat::Contiguous;
}
inline at::Tensor in_layout(const at::Tensor& tensor, Layout layout) {
  if (layout == Layout::channels_last_1d) return tensor.transpose(1, 2).contiguous().transpose(1, 2);
  return tensor.contiguous(format_of(layout));
}
inline at::Tensor empty_like(const at::Tensor& input, Layout layout) {
  if (layout == Layout::channels_last_1d)
    return at::empty_symint({input.sym_size(0), input.sym_size(2), input.sym_size(1)}, input.options()).transpose(1, 2);
  return at::empty_symint(input.sym_sizes(), input.options().memory_format(format_of(layout)));
}

struct Outputs { at::Tensor output, mean, rstd; };
inline Outputs empty_outputs(const at::Tensor& input, int64_t groups, Layout layout) {
  const auto statistics = input.options().dtype(math_type(input.scalar_type()));
  const auto make = [&] { return at::empty_symint({input.sym_size(0), groups}, statistics); };
  return {empty_like(input, layout), make(), make()};
}
struct Gradients { at::Tensor input, weight, bias; };
// The gradients of weights that are not there, or not wanted, are empty.
inline Gradients empty_gradients(const at::Tensor& input, Layout layout, const OptionalTensor& weight,
                                 const OptionalTensor& bias, bool wanted) {
  const auto like = [&](const OptionalTensor& w) {
    return has_value(w) && wanted ? at::empty_symint(w->sym_sizes(), w->options()) : at::empty({0}, input.options());
  };
  return {empty_like(input, layout), like(weight), like(bias)};
}

inline void check_statistics(const at::Tensor& input, int64_t groups, const at::Tensor& mean, const at::Tensor& rstd) {
  for (const at::Tensor* t : {&mean, &rstd}) {
    TORCH_CHECK_VALUE(t->dim() == 2 && t->sym_size(0) == input.sym_size(0) && t->sym_size(1) == groups &&
                          t->device() == input.device(),
                      "group_norm: ", t == &mean ? "mean" : "rstd",
                      " must hold one number for each image and group, not have shape ", t->sym_sizes(), " on ",
                      t->device());
    TORCH_CHECK_TYPE(t->scalar_type() == math_type(input.scalar_type()), "group_norm: ", t == &mean ? "mean" : "rstd",
                     " must be ", math_type(input.scalar_type()), ", not ", t->scalar_type());
  }
}
inline void check_gradient(const at::Tensor& grad_output, const at::Tensor& input) {
  TORCH_CHECK_VALUE(grad_output.sym_sizes() == input.sym_sizes() && grad_output.device() == input.device(),
                    "group_norm: the gradient has shape ", grad_output.sym_sizes(), " on ", grad_output.device(),
                    ", not ", input.sym_sizes(), " on ", input.device());
  TORCH_CHECK_TYPE(grad_output.scalar_type() == input.scalar_type(), "group_norm: the gradient is ",
                   grad_output.scalar_type(), ", not ", input.scalar_type());
}

inline const gpu::u8* bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const gpu::u8*>(tensor.const_data_ptr()) : nullptr;
}
inline gpu::u8* mutable_bytes(const at::Tensor& tensor) { return static_cast<gpu::u8*>(tensor.mutable_data_ptr()); }
inline at::Tensor contiguous(const OptionalTensor& tensor) {
  return has_value(tensor) ? tensor->contiguous() : at::Tensor();
}

inline gpu::GroupNorm arguments(const at::Tensor& x, Layout layout, int64_t groups, const at::Tensor& w,
                                const at::Tensor& b, double eps, bool silu) {
  gpu::GroupNorm a{};
  a.input = bytes(x);
  a.weight = bytes(w);
  a.bias = bytes(b);
  a.batch = x.size(0);
  a.channels = x.size(1);
  a.groups = groups;
  a.spatial = 1;
  for (int64_t d = 2; d < x.dim(); ++d) a.spatial *= x.size(d);
  a.eps = eps;
  a.input_type = element_type(name, x.scalar_type());
  a.weight_type = w.defined()   ? element_type(name, w.scalar_type())
                  : b.defined() ? element_type(name, b.scalar_type())
                                : a.input_type;
  a.channels_last = layout != Layout::contiguous || a.spatial == 1;
  a.silu = silu;
  return a;
}
// What kernels leave for each other, allocated as the plan says.
struct Partials {
  at::Tensor of_groups, of_channels;

  Partials(const GroupNormPlan& plan, const at::TensorOptions& options, gpu::GroupNorm* a) {
    const auto make = [&](int64_t count, at::Tensor& tensor, gpu::u8*& at) {
      if (count == 0) return;
      tensor = at::empty({count}, options);
      at = mutable_bytes(tensor);
    };
    make(plan.group_partials, of_groups, a->group_partials);
    make(plan.channel_partials, of_channels, a->channel_partials);
  }
};

// Both: false if the reference must run.
inline bool run_forward(const at::Tensor& input, int64_t groups, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool silu, Outputs* made) {
  const apex_place place = place_of(input.device());
  if (place.platform < 0) return false;
  const Layout layout = layout_of(input);
  const at::Tensor x = in_layout(input, layout), w = contiguous(weight), b = contiguous(bias);
  *made = empty_outputs(input, groups, layout);
  gpu::GroupNorm a = arguments(x, layout, groups, w, b, eps, silu);
  a.output = mutable_bytes(made->output);
  a.mean = mutable_bytes(made->mean);
  a.rstd = mutable_bytes(made->rstd);
  GroupNormPlan plan;
  if (use_reference(apex_group_norm_prepare(&place, &a, 0, &plan), name)) return false;
  const Partials partials(plan, made->mean.options(), &a);
  if (use_reference(apex_group_norm_forward(&place, &a, &plan), name)) return false;
  if (x.numel() == 0) {
    made->mean.fill_(std::numeric_limits<double>::quiet_NaN());
    made->rstd.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return true;
}
inline bool run_backward(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean,
                         const at::Tensor& rstd, int64_t groups, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps, bool silu, bool weight_gradients, Gradients* made) {
  const apex_place place = place_of(input.device());
  if (place.platform < 0) return false;
  const Layout layout = layout_of(input);
  const at::Tensor x = in_layout(input, layout), dy = in_layout(grad_output, layout), w = contiguous(weight),
                   b = contiguous(bias), m = mean.contiguous(), r = rstd.contiguous();
  *made = empty_gradients(input, layout, weight, bias, weight_gradients);
  gpu::GroupNorm a = arguments(x, layout, groups, w, b, eps, silu);
  a.grad_output = bytes(dy);
  a.output = mutable_bytes(made->input);
  a.mean = const_cast<gpu::u8*>(bytes(m));  // the backward reads it
  a.rstd = const_cast<gpu::u8*>(bytes(r));
  if (w.defined() && weight_gradients) a.grad_weight = mutable_bytes(made->weight);
  if (b.defined() && weight_gradients) a.grad_bias = mutable_bytes(made->bias);
  GroupNormPlan plan;
  if (use_reference(apex_group_norm_prepare(&place, &a, 1, &plan), name)) return false;
  const Partials partials(plan, m.options(), &a);
  if (use_reference(apex_group_norm_backward(&place, &a, &plan), name)) return false;
  if (x.numel() == 0) {
    made->weight.zero_();
    made->bias.zero_();
  }
  return true;
}

// The same gradients by torch's differentiable ops: what double backward differentiates.
inline Gradients differentiable_backward(const at::Tensor& grad_output, const at::Tensor& input, int64_t groups,
                                         const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                         bool silu, bool weight_gradients) {
  const at::ScalarType math = math_type(input.scalar_type());
  const c10::SymInt batch = input.sym_size(0), channels = input.sym_size(1);
  const c10::SymInt spatial = c10::multiply_integers(input.sym_sizes().slice(2));
  const std::vector<c10::SymInt> shape{batch, groups, channels / groups, spatial};
  const auto of_channels = [&](const OptionalTensor& w) {
    return w->to(math).reshape_symint({1, groups, channels / groups, 1});
  };
  const at::Tensor x = input.to(math).reshape_symint(shape);
  at::Tensor g = grad_output.to(math).reshape_symint(shape);
  const std::vector<int64_t> over{2, 3};
  const at::Tensor centred = x - x.mean(over, true), rstd = (centred * centred).mean(over, true).add(eps).rsqrt(),
                   normalized = centred * rstd;
  if (silu) {
    at::Tensor z = has_value(weight) ? normalized * of_channels(weight) : normalized;
    if (has_value(bias)) z = z + of_channels(bias);
    const at::Tensor s = at::sigmoid(z);
    g = g * s * (z * (1 - s) + 1);
  }
  const at::Tensor gw = has_value(weight) ? g * of_channels(weight) : g;
  const at::Tensor grad = (gw - gw.mean(over, true) - normalized * (gw * normalized).mean(over, true)) * rstd;
  const auto of_weight = [&](const at::Tensor& t, const OptionalTensor& w) {
    if (!has_value(w) || !weight_gradients) return at::empty({0}, input.options());
    return t.sum(std::vector<int64_t>{0, 3}).reshape_symint({channels}).to(w->scalar_type());
  };
  return {grad.reshape_symint(input.sym_sizes()).to(input.scalar_type()), of_weight(g * normalized, weight),
          of_weight(g, bias)};
}

using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, int64_t, const OptionalTensor&,
                                                               const OptionalTensor&, double, bool);
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                                const at::Tensor&, int64_t, const OptionalTensor&,
                                                                const OptionalTensor&, double, bool, bool);

struct GroupNormNode : Node {
  SavedVariable input, weight, bias, mean, rstd;
  int64_t groups = 1;
  double eps = 0;
  bool silu = false;

  variable_list apply(variable_list&& gradients) override {
    static const auto backward = dispatcher_op<Backward>("apex::group_norm_backward");
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list found(3);
    if (!gradients[0].defined()) return found;
    const at::Tensor x = input.unpack(), m = mean.unpack(), r = rstd.unpack();
    const OptionalTensor w = weight.unpack(), b = bias.unpack();
    const bool weights = task_should_compute_output(1) || task_should_compute_output(2);
    std::optional<at::AutoDispatchBelowADInplaceOrView> nothing_records;
    if (!at::GradMode::is_enabled()) nothing_records.emplace();  // past the backward's own autograd kernel
    const auto made = backward.call(gradients[0], x, m, r, groups, w, b, eps, silu, weights);
    if (task_should_compute_output(0)) found[0] = std::get<0>(made);
    if (task_should_compute_output(1) && has_value(w)) found[1] = std::get<1>(made);
    if (task_should_compute_output(2) && has_value(b)) found[2] = std::get<2>(made);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&input, &weight, &bias, &mean, &rstd}) s->reset_data();
  }
  std::string name() const override { return "ApexGroupNormBackward"; }
};
inline torch::autograd::Edge edge_of(const OptionalTensor& tensor) {
  return requires_grad(tensor) ? torch::autograd::impl::gradient_edge(*tensor) : torch::autograd::Edge();
}
}  // namespace group_norm

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_forward(const at::Tensor& input, int64_t num_groups,
                                                                         const std::optional<at::Tensor>& weight,
                                                                         const std::optional<at::Tensor>& bias,
                                                                         double eps, bool silu) {
  group_norm::check(input, num_groups, weight, bias);
  group_norm::Outputs o;
  if (group_norm::run_forward(input, num_groups, weight, bias, eps, silu, &o)) return {o.output, o.mean, o.rstd};
  return call_reference<group_norm::Forward>("group_norm_forward", input, num_groups, weight, bias, eps, silu);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_forward_meta(const at::Tensor& input,
                                                                              int64_t num_groups,
                                                                              const std::optional<at::Tensor>& weight,
                                                                              const std::optional<at::Tensor>& bias,
                                                                              double, bool) {
  group_norm::check(input, num_groups, weight, bias);
  const group_norm::Outputs o = group_norm::empty_outputs(input, num_groups, group_norm::layout_of(input));
  return {o.output, o.mean, o.rstd};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_forward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& input, int64_t num_groups, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps, bool silu) {
  static const auto op = dispatcher_op<group_norm::Forward>("apex::group_norm_forward");
  refuse_forward_mode_of("group_norm", input, weight, bias);
  NodePointer<group_norm::GroupNormNode> node;
  if (records(input, weight, bias)) {
    node = make_node<group_norm::GroupNormNode>();
    node->set_next_edges({group_norm::edge_of(input), group_norm::edge_of(weight), group_norm::edge_of(bias)});
    node->groups = num_groups;
    node->eps = eps;
    node->silu = silu;
    node->input = SavedVariable(input, false);
    if (has_value(weight)) node->weight = SavedVariable(*weight, false);
    if (has_value(bias)) node->bias = SavedVariable(*bias, false);
  }
  auto made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return op.redispatch(keys & c10::after_autograd_keyset, input, num_groups, weight, bias, eps, silu);
  }();
  if (node) {
    torch::autograd::set_history(std::get<0>(made), node);
    node->mean = SavedVariable(std::get<1>(made), false);
    node->rstd = SavedVariable(std::get<2>(made), false);
  }
  return made;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& rstd,
    int64_t num_groups, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
    bool silu, bool weight_gradients) {
  group_norm::check(input, num_groups, weight, bias);
  group_norm::check_gradient(grad_output, input);
  group_norm::check_statistics(input, num_groups, mean, rstd);
  group_norm::Gradients g;
  if (group_norm::run_backward(grad_output, input, mean, rstd, num_groups, weight, bias, eps, silu, weight_gradients,
                               &g))
    return {g.input, g.weight, g.bias};
  return call_reference<group_norm::Backward>("group_norm_backward", grad_output, input, mean, rstd, num_groups, weight,
                                              bias, eps, silu, weight_gradients);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_backward_meta(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& rstd,
    int64_t num_groups, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double, bool,
    bool weight_gradients) {
  group_norm::check(input, num_groups, weight, bias);
  group_norm::check_gradient(grad_output, input);
  group_norm::check_statistics(input, num_groups, mean, rstd);
  const group_norm::Gradients g =
      group_norm::empty_gradients(input, group_norm::layout_of(input), weight, bias, weight_gradients);
  return {g.input, g.weight, g.bias};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_backward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& mean,
    const at::Tensor& rstd, int64_t num_groups, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps, bool silu, bool weight_gradients) {
  static const auto op = dispatcher_op<group_norm::Backward>("apex::group_norm_backward");
  refuse_forward_mode_of("group_norm", grad_output, input, weight, bias);
  if (records(grad_output, input, weight, bias)) {
    const group_norm::Gradients g =
        group_norm::differentiable_backward(grad_output, input, num_groups, weight, bias, eps, silu, weight_gradients);
    return {g.input, g.weight, g.bias};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.redispatch(keys & c10::after_autograd_keyset, grad_output, input, mean, rstd, num_groups, weight, bias, eps,
                       silu, weight_gradients);
}
}  // namespace apex

// No autocast rule: the output has the input's dtype, and weights may have another.
APEX_FUNCTIONAL_OP(group_norm_forward)
APEX_FUNCTIONAL_OP(group_norm_backward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
// The forward's output alone, past torch.ops: for eager calls.
APEX_PYTHON_OP(group_norm, m) {
  m.def(
      "group_norm",
      [](const at::Tensor& input, int64_t num_groups, const std::optional<at::Tensor>& weight,
         const std::optional<at::Tensor>& bias, double eps, bool silu) {
        static const auto forward = apex::dispatcher_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
            const at::Tensor&, int64_t, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, double,
            bool)>("apex::group_norm_forward");
        return std::get<0>(forward.call(input, num_groups, weight, bias, eps, silu));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
