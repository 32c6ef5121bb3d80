// layer_norm and rms_norm, and both with a residual that is added first: checks, outputs, launches.
//
// Each function is one of all these ops, which differ in the arguments that they have (generated/shared_norm.h).
#pragma once
#include "checks.h"
#include "generated/shared_norm.h"
#include "host/layer_norm.h"
#include "host/rms_norm.h"

#include <ATen/ops/empty.h>

namespace apex {
// Under autocast the output has autocast's dtype, whatever was asked for; inputs and weights are read as they are.
inline std::optional<at::ScalarType> norm_autocast_dtype(const at::Tensor& input, std::optional<at::ScalarType> dtype) {
  return input.scalar_type() == at::kDouble ? dtype : autocast_dtype(input);
}

namespace norm {
inline bool is_centered(const Arguments& in) { return in.unit[0] == 'l'; }  // layer_norm, not rms_norm
inline bool has_residual(const Arguments& in) { return in.residual.defined(); }
// Of the output of a forward op, of the input of a backward op.
inline at::ScalarType type_of(const Arguments& in) {
  return in.dtype.value_or((in.is_forward ? in.input : in.saved).scalar_type());
}

inline c10::SymInt rows_of(const at::Tensor& input, c10::SymIntArrayRef shape) {
  const auto sizes = input.sym_sizes();
  return c10::multiply_integers(sizes.slice(0, sizes.size() - shape.size()));
}
// Throws unless the tensor ends in normalized_shape, and the weights have it.
inline void check_shape(const char* op, const at::Tensor& input, c10::SymIntArrayRef shape,
                        const OptionalTensor& weight, const OptionalTensor& bias) {
  const c10::SymIntArrayRef sizes = input.sym_sizes();
  TORCH_CHECK_VALUE(!shape.empty(), op, ": normalized_shape must have at least one dimension");
  TORCH_CHECK_VALUE(sizes.size() >= shape.size() && sizes.slice(sizes.size() - shape.size()) == shape, op,
                    ": normalized_shape ", shape, " is not how the input's shape ", sizes, " ends");
  check_like(op, "weight", weight, shape, std::nullopt, "normalized_shape ");
  check_like(op, "bias", bias, shape, std::nullopt, "normalized_shape ");
  check_one_dtype(op, weight, bias);
}
// Throws unless a backward op is given what its forward left: kernels read as much of each tensor as the shape says.
inline void check_backward(const Arguments& in) {
  const char* op = in.unit;
  const at::Tensor& saved = in.saved;
  const at::ScalarType type = type_of(in), output_type = in.grad_output.scalar_type(), math = math_type(type);
  check_shape(op, saved, in.normalized_shape, in.weight, in.bias);
  check_like(op, "the gradient", in.grad_output, saved.sym_sizes(), output_type);
  check_like(op, "the saved tensor", saved, saved.sym_sizes(), in.memory_efficient ? output_type : type);
  check_like(op, "the gradient of the sum", in.grad_sum, saved.sym_sizes(), type);
  const c10::SymInt rows = rows_of(saved, in.normalized_shape);
  const auto check_statistic = [&](const char* name, const OptionalTensor& tensor) {
    TORCH_CHECK_VALUE(has_value(tensor) && tensor->sym_numel() == rows && tensor->scalar_type() == math, op, ": ", name,
                      " must hold one ", math, " for each row");
  };
  check_statistic("rstd", in.rstd);
  if (is_centered(in) && !in.memory_efficient) check_statistic("mean", in.mean);
}

inline void check_forward(const Arguments& in) {
  const char* op = in.unit;
  check_shape(op, in.input, in.normalized_shape, in.weight, in.bias);
  if (!std::string_view(in.name).starts_with("add_")) return;
  check_like(op, "the residual", in.residual, in.input.sym_sizes(), in.input.scalar_type(), "the input's ");
}
inline void check(const Arguments& in) { in.is_forward ? check_forward(in) : check_backward(in); }

inline Results outputs(const Arguments& in) {
  Results made;
  if (in.is_forward) {
    const auto statistics = in.input.options().dtype(math_type(in.input));
    const c10::SymInt rows = rows_of(in.input, in.normalized_shape);
    made.output = at::empty_symint(in.input.sym_sizes(), in.input.options().dtype(type_of(in)));
    if (is_centered(in)) made.mean = at::empty_symint({rows}, statistics);
    made.rstd = at::empty_symint({rows}, statistics);
    if (has_residual(in)) made.sum = at::empty_symint(in.input.sym_sizes(), in.input.options());
    return made;
  }
  made.grad_input = at::empty_symint(in.saved.sym_sizes(), in.saved.options().dtype(type_of(in)));
  made.grad_weight = gradient_like(in.weight, in.weight_gradients, in.saved);
  if (is_centered(in)) made.grad_bias = gradient_like(in.bias, in.weight_gradients, in.saved);
  return made;
}

inline bool launch_forward(const Arguments& in, const apex_place& place, Results& made) {
  const char* op = in.unit;
  const at::Tensor x = in.input.contiguous(), r = has_residual(in) ? in.residual.contiguous() : at::Tensor(),
                   w = contiguous(in.weight), b = contiguous(in.bias);
  made = outputs(in);
  gpu::NormForward a{};
  a.input = bytes(x), a.residual = bytes(r), a.weight = bytes(w), a.bias = bytes(b);
  a.output = mutable_bytes(made.output), a.sum = mutable_bytes(made.sum);
  a.mean = mutable_bytes(made.mean), a.rstd = mutable_bytes(made.rstd);
  a.rows = made.rstd.numel();
  a.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(in.normalized_shape));
  a.eps = in.eps;
  a.input_type = element_type(op, x.scalar_type());
  a.output_type = element_type(op, made.output.scalar_type());
  a.weight_type = w.defined() || b.defined() ? element_type(op, (w.defined() ? w : b).scalar_type()) : a.input_type;
  if (use_reference((is_centered(in) ? &apex_layer_norm_forward : &apex_rms_norm_forward)(&place, &a), op))
    return false;
  if (a.hidden == 0) {
    if (made.mean.defined()) made.mean.fill_(std::numeric_limits<double>::quiet_NaN());
    made.rstd.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return true;
}

inline bool launch_backward(const Arguments& in, const apex_place& place, Results& made) {
  const char* op = in.unit;
  const bool centered = is_centered(in);
  const at::Tensor grad = in.grad_output.contiguous(), saved = in.saved.contiguous(), more = contiguous(in.grad_sum),
                   mean = contiguous(in.mean), rstd = in.rstd.contiguous(), w = contiguous(in.weight),
                   b = contiguous(in.bias);
  made = outputs(in);
  gpu::NormBackward a{};
  a.grad_output = bytes(grad), a.saved = bytes(saved), a.grad_sum = bytes(more), a.rstd = bytes(rstd);
  a.mean = centered && !in.memory_efficient ? bytes(mean) : nullptr;
  a.weight = bytes(w), a.bias = bytes(b), a.grad_input = mutable_bytes(made.grad_input);
  if (in.weight_gradients && w.defined()) a.grad_weight = mutable_bytes(made.grad_weight);
  if (in.weight_gradients && b.defined()) a.grad_bias = mutable_bytes(made.grad_bias);
  TORCH_CHECK_VALUE(!a.grad_bias || a.grad_weight, op, ": a bias needs a weight beside it");
  a.rows = rstd.numel();
  a.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(in.normalized_shape));
  a.eps = in.eps;
  a.input_type = element_type(op, made.grad_input.scalar_type());
  a.output_type = element_type(op, grad.scalar_type());
  a.weight_type = w.defined() ? element_type(op, w.scalar_type()) : a.input_type;
  a.from_output = in.memory_efficient;
  const auto launch = centered ? &apex_layer_norm_backward : &apex_rms_norm_backward;
  return run_with_workspace(launch, place, a, op, saved.device());
}
inline bool launch(const Arguments& in, const apex_place& place, Results& made) {
  return (in.is_forward ? &launch_forward : &launch_backward)(in, place, made);
}

inline Results formula(const Arguments& in) {
  const at::Tensor& input = in.saved;
  const int64_t dims = input.dim(), kept = dims - int64_t(in.normalized_shape.size());
  std::vector<int64_t> over, rows;
  for (int64_t d = 0; d < dims; ++d) (d < kept ? rows : over).push_back(d);
  const at::ScalarType math = math_type(type_of(in));
  const at::Tensor x = input.to(math), dy = in.grad_output.to(math);
  const at::Tensor centred = is_centered(in) ? x - x.mean(over, true) : x;
  const at::Tensor rstd = (centred * centred).mean(over, true).add(in.eps).rsqrt(), normalized = centred * rstd;
  const at::Tensor g = has_value(in.weight) ? dy * in.weight->to(math) : dy;
  at::Tensor grad = g - normalized * (g * normalized).mean(over, true);
  if (is_centered(in)) grad = grad - g.mean(over, true);
  grad = grad * rstd;
  if (has_value(in.grad_sum)) grad = grad + in.grad_sum->to(math);
  const auto over_rows = [&](const at::Tensor& t, const OptionalTensor& w) {
    if (!has_value(w) || !in.weight_gradients) return no_elements(input);
    return (rows.empty() ? t : t.sum(rows)).to(w->scalar_type());
  };
  Results made;
  made.grad_input = grad.to(type_of(in));
  made.grad_weight = over_rows(dy * normalized, in.weight), made.grad_bias = over_rows(dy, in.bias);
  return made;
}
}  // namespace norm
}  // namespace apex
