// What layer_norm and rms_norm share: checks, launches, autograd.
#pragma once
#include "device/norm_layout.h"
#include "functional.h"
#include "host/layer_norm.h"
#include "host/rms_norm.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/empty.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
using OptionalTensor = std::optional<at::Tensor>;

struct NormFunctions {
  const char* name;
  bool centered;
  int32_t (*forward)(const apex_place*, const gpu::NormForward*);
  int32_t (*prepare)(const apex_place*, gpu::NormBackward*, NormPlan*);
  int32_t (*backward)(const apex_place*, const gpu::NormBackward*, const NormPlan*);
};
constexpr NormFunctions layer_norm_functions{"layer_norm", true, &apex_layer_norm_forward, &apex_layer_norm_prepare,
                                             &apex_layer_norm_backward};
constexpr NormFunctions rms_norm_functions{"rms_norm", false, &apex_rms_norm_forward, &apex_rms_norm_prepare,
                                           &apex_rms_norm_backward};

inline at::ScalarType norm_math(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }
inline const gpu::u8* bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const gpu::u8*>(tensor.const_data_ptr()) : nullptr;
}
inline gpu::u8* mutable_bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<gpu::u8*>(tensor.mutable_data_ptr()) : nullptr;
}
inline at::Tensor contiguous(const OptionalTensor& tensor) {
  return has_value(tensor) ? tensor->contiguous() : at::Tensor();
}

// Throws unless the tensor ends in normalized_shape, and the weights have it. Works with symbolic sizes.
inline void check_norm(const char* op, const at::Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                       const OptionalTensor& bias) {
  const auto sizes = input.sym_sizes();
  TORCH_CHECK_VALUE(!shape.empty(), op, ": normalized_shape must have at least one dimension");
  TORCH_CHECK_VALUE(sizes.size() >= shape.size() && sizes.slice(sizes.size() - shape.size()) == shape, op,
                    ": normalized_shape ", shape, " is not how the input's shape ", sizes, " ends");
  for (const OptionalTensor* w : {&weight, &bias}) {
    if (!has_value(*w)) continue;
    const char* name = w == &weight ? "weight" : "bias";
    TORCH_CHECK_VALUE((*w)->sym_sizes() == shape, op, ": ", name, " has shape ", (*w)->sym_sizes(),
                      " but normalized_shape is ", shape);
    TORCH_CHECK_VALUE((*w)->device() == input.device(), op, ": ", name, " is on ", (*w)->device(),
                      " but the input is on ", input.device());
  }
  TORCH_CHECK_TYPE(!has_value(weight) || !has_value(bias) || weight->scalar_type() == bias->scalar_type(), op,
                   ": weight and bias must have one dtype");
}
inline void check_residual(const char* op, const at::Tensor& input, const at::Tensor& residual) {
  TORCH_CHECK_VALUE(residual.sym_sizes() == input.sym_sizes() && residual.device() == input.device(), op,
                    ": the residual must have the input's shape ", input.sym_sizes(), " and be on its device, ",
                    input.device());
  TORCH_CHECK_TYPE(residual.scalar_type() == input.scalar_type(), op, ": the residual must have the input's dtype ",
                   input.scalar_type());
}
inline c10::SymInt norm_rows(const at::Tensor& input, c10::SymIntArrayRef shape) {
  const auto sizes = input.sym_sizes();
  c10::SymInt rows = 1;
  for (const auto& size : sizes.slice(0, sizes.size() - shape.size())) rows *= size;
  return rows;
}

struct NormOutputs { at::Tensor output, mean, rstd, sum; };
// Empty outputs of the right shapes and dtypes, symbolic ones too.
inline NormOutputs norm_outputs(const NormFunctions& op, const at::Tensor& input, bool has_residual,
                                c10::SymIntArrayRef shape, at::ScalarType dtype) {
  NormOutputs made;
  const auto statistics = input.options().dtype(norm_math(input.scalar_type()));
  const c10::SymInt rows = norm_rows(input, shape);
  made.output = at::empty_symint(input.sym_sizes(), input.options().dtype(dtype));
  if (op.centered) made.mean = at::empty_symint({rows}, statistics);
  made.rstd = at::empty_symint({rows}, statistics);
  if (has_residual) made.sum = at::empty_symint(input.sym_sizes(), input.options());
  return made;
}

struct NormGradients { at::Tensor input, weight, bias; };
// The gradients of weights that are not there, or not wanted, are empty.
inline NormGradients norm_gradients(const at::Tensor& saved, at::ScalarType dtype, const OptionalTensor& weight,
                                    const OptionalTensor& bias, bool wanted) {
  const auto like = [&](const OptionalTensor& w) {
    return has_value(w) && wanted ? at::empty_symint(w->sym_sizes(), w->options()) : at::empty({0}, saved.options());
  };
  return {at::empty_symint(saved.sym_sizes(), saved.options().dtype(dtype)), like(weight), like(bias)};
}

// Runs the forward; false: the reference must.
inline bool run_norm_forward(const NormFunctions& op, const at::Tensor& input, const OptionalTensor& residual,
                             c10::SymIntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias,
                             double eps, at::ScalarType dtype, NormOutputs* outputs) {
  const apex_place place = place_of(input.device());
  if (place.platform < 0) return false;
  const at::Tensor x = input.contiguous(), r = contiguous(residual), w = contiguous(weight), b = contiguous(bias);
  *outputs = norm_outputs(op, input, has_value(residual), shape, dtype);
  gpu::NormForward a{};
  a.input = bytes(x);
  a.residual = bytes(r);
  a.sum = mutable_bytes(outputs->sum);
  a.weight = bytes(w);
  a.bias = bytes(b);
  a.output = mutable_bytes(outputs->output);
  a.mean = mutable_bytes(outputs->mean);
  a.rstd = mutable_bytes(outputs->rstd);
  a.rows = outputs->rstd.numel();
  a.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(shape));
  a.eps = eps;
  a.input_type = element_type(op.name, input.scalar_type());
  a.output_type = element_type(op.name, dtype);
  a.weight_type =
      w.defined() || b.defined() ? element_type(op.name, (w.defined() ? w : b).scalar_type()) : a.input_type;
  if (use_reference(op.forward(&place, &a), op.name)) return false;
  if (a.hidden == 0) {
    if (outputs->mean.defined()) outputs->mean.fill_(std::numeric_limits<double>::quiet_NaN());
    outputs->rstd.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return true;
}

// What a backward op is given.
struct NormBackwardInputs {
  const at::Tensor& grad_output;
  const OptionalTensor& grad_sum;
  const at::Tensor& saved;
  const OptionalTensor& mean;
  const at::Tensor& rstd;
  c10::SymIntArrayRef shape;
  const OptionalTensor &weight, &bias;
  double eps;
  bool from_output;
  at::ScalarType dtype;  // of the input
  bool weight_gradients;
};

// Throws unless a backward op is given what its forward left: kernels read as much of each tensor as the shape says.
inline void check_norm_backward(const NormFunctions& op, const NormBackwardInputs& in) {
  check_norm(op.name, in.saved, in.shape, in.weight, in.bias);
  const auto beside = [&](const at::Tensor& tensor) { return tensor.device() == in.saved.device(); };
  TORCH_CHECK_VALUE(in.grad_output.sizes() == in.saved.sizes() && beside(in.grad_output), op.name,
                    ": the gradient has shape ", in.grad_output.sizes(), " on ", in.grad_output.device(), ", not ",
                    in.saved.sizes(), " on ", in.saved.device());
  const at::ScalarType output_type = in.grad_output.scalar_type();
  TORCH_CHECK_TYPE(in.saved.scalar_type() == (in.from_output ? output_type : in.dtype), op.name,
                   ": the saved tensor has dtype ", in.saved.scalar_type(), ", not ",
                   in.from_output ? output_type : in.dtype);
  if (has_value(in.grad_sum)) {
    TORCH_CHECK_VALUE(in.grad_sum->sizes() == in.saved.sizes() && beside(*in.grad_sum), op.name,
                      ": the gradient of the sum has shape ", in.grad_sum->sizes(), " on ", in.grad_sum->device(),
                      ", not ", in.saved.sizes(), " on ", in.saved.device());
    TORCH_CHECK_TYPE(in.grad_sum->scalar_type() == in.dtype, op.name, ": the gradient of the sum has dtype ",
                     in.grad_sum->scalar_type(), ", not ", in.dtype);
  }
  const at::ScalarType math = norm_math(in.dtype);
  const int64_t rows = norm_rows(in.saved, in.shape).guard_int(__FILE__, __LINE__);
  const auto one_a_row = [&](const at::Tensor& tensor) {
    return tensor.numel() == rows && tensor.scalar_type() == math && beside(tensor);
  };
  TORCH_CHECK_VALUE(one_a_row(in.rstd), op.name, ": rstd must hold one ", math, " for each row, on ",
                    in.saved.device());
  TORCH_CHECK_VALUE(!op.centered || in.from_output || (has_value(in.mean) && one_a_row(*in.mean)), op.name,
                    ": mean must hold one ", math, " for each row, on ", in.saved.device());
}

inline bool run_norm_backward(const NormFunctions& op, const NormBackwardInputs& in, NormGradients* gradients) {
  check_norm_backward(op, in);
  const apex_place place = place_of(in.saved.device());
  if (place.platform < 0) return false;
  const at::ScalarType output_type = in.grad_output.scalar_type(), math = norm_math(in.dtype);
  const at::Tensor grad = in.grad_output.contiguous(), saved = in.saved.contiguous(), more = contiguous(in.grad_sum),
                   mean = contiguous(in.mean), rstd = in.rstd.contiguous(), w = contiguous(in.weight),
                   b = contiguous(in.bias);
  *gradients = norm_gradients(saved, in.dtype, in.weight, in.bias, in.weight_gradients);
  gpu::NormBackward a{};
  a.grad_output = bytes(grad);
  a.saved = bytes(saved);
  a.grad_sum = bytes(more);
  a.mean = op.centered && !in.from_output ? bytes(mean) : nullptr;
  a.rstd = bytes(rstd);
  a.weight = bytes(w);
  a.bias = bytes(b);
  a.grad_input = mutable_bytes(gradients->input);
  if (in.weight_gradients && w.defined()) a.grad_weight = mutable_bytes(gradients->weight);
  if (in.weight_gradients && b.defined()) a.grad_bias = mutable_bytes(gradients->bias);
  TORCH_CHECK_VALUE(!a.grad_bias || a.grad_weight, op.name, ": a bias needs a weight beside it");
  a.rows = rstd.numel();
  a.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(in.shape));
  a.eps = in.eps;
  a.input_type = element_type(op.name, in.dtype);
  a.output_type = element_type(op.name, output_type);
  a.weight_type = w.defined() ? element_type(op.name, w.scalar_type()) : a.input_type;
  a.from_output = in.from_output;
  NormPlan plan;
  if (use_reference(op.prepare(&place, &a, &plan), op.name)) return false;
  at::Tensor partials;
  if (a.grad_weight && a.parts > 0) {
    partials =
        at::empty({op.centered ? 2 : 1, a.parts, gpu::norm_partials_pitch(a.hidden)}, saved.options().dtype(math));
    a.partials = mutable_bytes(partials);
  }
  return !use_reference(op.backward(&place, &a, &plan), op.name);
}

// The same gradients by torch's differentiable ops: what double backward differentiates.
inline NormGradients differentiable_norm_backward(bool centered, const NormBackwardInputs& in,
                                                  const at::Tensor& input) {
  const int64_t dims = input.dim(), kept = dims - int64_t(in.shape.size());
  std::vector<int64_t> over, rows;
  for (int64_t d = 0; d < dims; ++d) (d < kept ? rows : over).push_back(d);
  const at::ScalarType math = norm_math(in.dtype);
  const at::Tensor x = input.to(math), dy = in.grad_output.to(math);
  const at::Tensor centred = centered ? x - x.mean(over, true) : x;
  const at::Tensor rstd = (centred * centred).mean(over, true).add(in.eps).rsqrt(), normalized = centred * rstd;
  const at::Tensor g = has_value(in.weight) ? dy * in.weight->to(math) : dy;
  at::Tensor grad = g - normalized * (g * normalized).mean(over, true);
  if (centered) grad = grad - g.mean(over, true);
  grad = grad * rstd;
  if (has_value(in.grad_sum)) grad = grad + in.grad_sum->to(math);
  const auto over_rows = [&](const at::Tensor& t, const OptionalTensor& w) {
    if (!has_value(w) || !in.weight_gradients) return at::empty({0}, input.options());
    return (rows.empty() ? t : t.sum(rows)).to(w->scalar_type());
  };
  return {grad.to(in.dtype), over_rows(dy * normalized, in.weight), over_rows(dy, in.bias)};
}

// Gradients of (input, [residual,] weight, [bias]) from those of (output, [sum]).
struct NormNode : Node {
  using Backward = NormGradients (*)(const NormBackwardInputs&);
  Backward backward = nullptr;
  SavedVariable saved, weight, bias, mean, rstd;
  std::vector<c10::SymInt> shape;
  double eps = 0;
  bool from_output = false, has_residual = false, has_bias = false;
  at::ScalarType dtype = at::kFloat;

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const OptionalTensor grad_sum = has_residual ? OptionalTensor(gradients[1]) : std::nullopt;
    const uint32_t of_weight = has_residual ? 2 : 1;
    variable_list found(of_weight + (has_bias ? 2 : 1));
    const auto set = [&](uint32_t i, const at::Tensor& gradient) {
      if (task_should_compute_output(i)) found[i] = gradient;
    };
    NormGradients made;
    if (gradients[0].defined()) {
      const at::Tensor x = saved.unpack(from_output || has_residual ? getptr() : nullptr), r = rstd.unpack();
      const OptionalTensor w = weight.unpack(), b = bias.unpack(), m = mean.unpack();
      const bool weights =
          task_should_compute_output(of_weight) || (has_bias && task_should_compute_output(of_weight + 1));
      std::optional<at::AutoDispatchBelowADInplaceOrView> nothing_records;
      if (!at::GradMode::is_enabled()) nothing_records.emplace();  // past the backward's own autograd kernel
      made = backward({gradients[0], grad_sum, x, m, r, shape, w, b, eps, from_output, dtype, weights});
      if (has_value(w)) set(of_weight, made.weight);
      if (has_bias && has_value(b)) set(of_weight + 1, made.bias);
    } else if (has_value(grad_sum)) {
      made.input = *grad_sum;
    }
    set(0, made.input);
    if (has_residual) set(1, made.input);
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&saved, &weight, &bias, &mean, &rstd}) s->reset_data();
  }
  std::string name() const override { return "ApexNormBackward"; }
};

inline torch::autograd::Edge gradient_edge_of(const OptionalTensor& tensor) {
  return requires_grad(tensor) ? torch::autograd::impl::gradient_edge(*tensor) : torch::autograd::Edge();
}
// The Autograd kernel of a forward op: `below` runs it for the other keys.
template <class Below>
NormOutputs record_norm(const NormFunctions& op, NormNode::Backward backward, const at::Tensor& input,
                        const OptionalTensor& residual, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool from_output, Below&& below) {
  refuse_forward_mode_of(op.name, input, residual, weight, bias);
  NodePointer<NormNode> node;
  if (records(input, residual, weight, bias)) {
    node = make_node<NormNode>();
    torch::autograd::edge_list edges{gradient_edge_of(input)};
    if (residual) edges.push_back(gradient_edge_of(residual));
    edges.push_back(gradient_edge_of(weight));
    if (op.centered) edges.push_back(gradient_edge_of(bias));
    node->set_next_edges(std::move(edges));
    node->backward = backward;
    node->shape.assign(shape.begin(), shape.end());
    node->eps = eps;
    node->from_output = from_output;
    node->has_residual = residual.has_value();
    node->has_bias = op.centered;
    node->dtype = input.scalar_type();
    if (has_value(weight)) node->weight = SavedVariable(*weight, false);
    if (has_value(bias)) node->bias = SavedVariable(*bias, false);
    if (!from_output && !residual) node->saved = SavedVariable(input, false);
  }
  NormOutputs made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return below();
  }();
  if (node) {
    torch::autograd::set_history(made.output, node);
    if (residual) torch::autograd::set_history(made.sum, node);
    if (from_output || residual) node->saved = SavedVariable(from_output ? made.output : made.sum, true);
    if (op.centered && !from_output) node->mean = SavedVariable(made.mean, false);
    node->rstd = SavedVariable(made.rstd, false);
  }
  return made;
}

// The Autograd kernel of a backward op: with create_graph=True its own derivative is wanted.
template <class Below> NormGradients record_norm_backward(const NormFunctions& op, const NormBackwardInputs& in,
                                                          Below&& below) {
  refuse_forward_mode_of(op.name, in.grad_output, in.grad_sum, in.saved, in.weight, in.bias);
  const bool recorded = records(in.grad_output, in.grad_sum, in.saved, in.weight, in.bias);
  if (recorded && !in.from_output) return differentiable_norm_backward(op.centered, in, in.saved);
  NormGradients made = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return below();
  }();
  if (recorded) {
    const auto node = no_double_backward(op.name, "needs the input, which memory_efficient=True does not keep",
                                         in.grad_output, in.grad_sum, in.saved, in.weight, in.bias);
    for (at::Tensor* gradient : {&made.input, &made.weight, &made.bias})
      if (gradient->defined()) torch::autograd::set_history(*gradient, node);
  }
  return made;
}

// Under autocast the output has autocast's dtype, whatever was asked for; inputs and weights are read as they are.
inline std::optional<at::ScalarType> norm_autocast_dtype(const at::Tensor& input, std::optional<at::ScalarType> dtype) {
  return input.scalar_type() == at::kDouble ? dtype : autocast_dtype(input);
}
}  // namespace apex
#endif
