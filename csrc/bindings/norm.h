// layer_norm and rms_norm, and both with a residual that is added first: checks, outputs, launches.
//
// Each function is one of all their structs (generated/layer_norm.h, generated/rms_norm.h), which differ in the
// arguments that they have.
#pragma once
#include "device/norm_layout.h"
#include "checks.h"
#include "host/layer_norm.h"
#include "host/rms_norm.h"

#include <ATen/ops/empty.h>

namespace apex {
// Under autocast the output has autocast's dtype, whatever was asked for; inputs and weights are read as they are.
inline std::optional<at::ScalarType> norm_autocast_dtype(const at::Tensor& input, std::optional<at::ScalarType> dtype) {
  return input.scalar_type() == at::kDouble ? dtype : autocast_dtype(input);
}

namespace norm {
template <class Call> constexpr bool is_forward = requires(const Call& call) { call.input; };
template <class Call> constexpr bool centered = requires(const Call& call) { call.bias; };
template <class Call> constexpr bool has_residual = requires(const Call& call) { call.residual; };

// The arguments of all forward ops, and of all backward ops: nothing of what one is without.
struct Forward {
  const char* op;
  bool centered, has_residual;
  const at::Tensor &input, &residual;
  c10::SymIntArrayRef shape;
  const OptionalTensor &weight, &bias;
  double eps;
  at::ScalarType type;  // of the output
};
struct Backward {
  const char* op;
  bool centered;
  const at::Tensor& grad_output;
  const OptionalTensor& grad_sum;
  const at::Tensor& saved;
  const OptionalTensor& mean;
  const at::Tensor& rstd;
  c10::SymIntArrayRef shape;
  const OptionalTensor &weight, &bias;
  double eps;
  bool from_output;
  at::ScalarType type;  // of the input
  bool weight_gradients;
};
template <class Call> auto arguments(const Call& c) {
  static const at::Tensor none;
  if constexpr (!is_forward<Call>) {
    return Backward{Call::unit,
                    centered<Call>,
                    c.grad_output,
                    APEX_IF_ANY(c, grad_sum),
                    c.saved,
                    APEX_IF_ANY(c, mean),
                    c.rstd,
                    c.normalized_shape,
                    c.weight,
                    APEX_IF_ANY(c, bias),
                    c.eps,
                    c.memory_efficient,
                    c.dtype.value_or(c.saved.scalar_type()),
                    c.weight_gradients};
  } else {
    const at::Tensor* residual = &none;
    if constexpr (has_residual<Call>) residual = &c.residual;
    return Forward{
        Call::unit,         centered<Call>, has_residual<Call>,   c.input, *residual,
        c.normalized_shape, c.weight,       APEX_IF_ANY(c, bias), c.eps,   c.dtype.value_or(c.input.scalar_type())};
  }
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
  for (const OptionalTensor* w : {&weight, &bias}) {
    if (!has_value(*w)) continue;
    const char* name = w == &weight ? "weight" : "bias";
    TORCH_CHECK_VALUE((*w)->sym_sizes() == shape, op, ": ", name, " has shape ", (*w)->sym_sizes(),
                      " but normalized_shape is ", shape);
    check_device(op, name, **w, input);
  }
  check_one_dtype(op, weight, bias);
}
// Throws unless a backward op is given what its forward left: kernels read as much of each tensor as the shape says.
inline void check(const Backward& in) {
  const char* op = in.op;
  const at::Tensor& saved = in.saved;
  const at::ScalarType output_type = in.grad_output.scalar_type(), math = math_type(in.type);
  check_shape(op, saved, in.shape, in.weight, in.bias);
  const auto beside = [&](const at::Tensor& tensor) { return tensor.device() == saved.device(); };
  const auto check_gradient = [&](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.sym_sizes() == saved.sym_sizes() && beside(tensor), op, ": the gradient", name,
                      " has shape ", tensor.sym_sizes(), " on ", tensor.device(), ", not ", saved.sym_sizes(), " on ",
                      saved.device());
  };
  check_gradient("", in.grad_output);
  TORCH_CHECK_TYPE(saved.scalar_type() == (in.from_output ? output_type : in.type), op, ": the saved tensor has dtype ",
                   saved.scalar_type(), ", not ", in.from_output ? output_type : in.type);
  if (has_value(in.grad_sum)) {
    check_gradient(" of the sum", *in.grad_sum);
    TORCH_CHECK_TYPE(in.grad_sum->scalar_type() == in.type, op, ": the gradient of the sum has dtype ",
                     in.grad_sum->scalar_type(), ", not ", in.type);
  }
  const c10::SymInt rows = rows_of(saved, in.shape);
  const auto check_statistic = [&](const char* name, const OptionalTensor& tensor) {
    TORCH_CHECK_VALUE(
        has_value(tensor) && tensor->sym_numel() == rows && tensor->scalar_type() == math && beside(*tensor), op, ": ",
        name, " must hold one ", math, " for each row, on ", saved.device());
  };
  check_statistic("rstd", in.rstd);
  if (in.centered && !in.from_output) check_statistic("mean", in.mean);
}

inline void check(const Forward& in) {
  check_shape(in.op, in.input, in.shape, in.weight, in.bias);
  if (!in.has_residual) return;
  TORCH_CHECK_VALUE(in.residual.sym_sizes() == in.input.sym_sizes() && in.residual.device() == in.input.device(), in.op,
                    ": the residual must have the input's shape ", in.input.sym_sizes(), " and be on its device, ",
                    in.input.device());
  TORCH_CHECK_TYPE(in.residual.scalar_type() == in.input.scalar_type(), in.op,
                   ": the residual must have the input's dtype ", in.input.scalar_type());
}
template <class Call> void check(const Call& call) { check(arguments(call)); }

struct Outputs { at::Tensor output, sum, mean, rstd; };
inline Outputs made_of(const Forward& in) {
  const auto statistics = in.input.options().dtype(math_type(in.input));
  const c10::SymInt rows = rows_of(in.input, in.shape);
  Outputs made;
  made.output = at::empty_symint(in.input.sym_sizes(), in.input.options().dtype(in.type));
  if (in.centered) made.mean = at::empty_symint({rows}, statistics);
  made.rstd = at::empty_symint({rows}, statistics);
  if (in.has_residual) made.sum = at::empty_symint(in.input.sym_sizes(), in.input.options());
  return made;
}
struct Gradients { at::Tensor input, weight, bias; };
// The gradients of weights that are not there, or not wanted, are empty.
inline Gradients made_of(const Backward& in) {
  const auto like = [&](const OptionalTensor& w) {
    return has_value(w) && in.weight_gradients ? at::empty_symint(w->sym_sizes(), w->options())
                                               : at::empty({0}, in.saved.options());
  };
  const at::Tensor weight = like(in.weight), bias = in.centered ? like(in.bias) : at::Tensor();
  return {at::empty_symint(in.saved.sym_sizes(), in.saved.options().dtype(in.type)), weight, bias};
}
// As the op returns them.
template <class Call> typename Call::Result results(const Outputs& made) {
  if constexpr (centered<Call> && has_residual<Call>) return {made.output, made.sum, made.mean, made.rstd};
  else if constexpr (centered<Call>) return {made.output, made.mean, made.rstd};
  else if constexpr (has_residual<Call>) return {made.output, made.sum, made.rstd};
  else return {made.output, made.rstd};
}
template <class Call> typename Call::Result results(const Gradients& made) {
  if constexpr (centered<Call>) return {made.input, made.weight, made.bias};
  else return {made.input, made.weight};
}
template <class Call> typename Call::Result outputs(const Call& call) {
  return results<Call>(made_of(arguments(call)));
}

inline bool run(const Forward& in, const apex_place& place, Outputs& made) {
  const at::Tensor x = in.input.contiguous(), r = in.has_residual ? in.residual.contiguous() : at::Tensor(),
                   w = contiguous(in.weight), b = contiguous(in.bias);
  made = made_of(in);
  gpu::NormForward a{};
  a.input = bytes(x), a.residual = bytes(r), a.weight = bytes(w), a.bias = bytes(b);
  a.output = mutable_bytes(made.output), a.sum = mutable_bytes(made.sum);
  a.mean = mutable_bytes(made.mean), a.rstd = mutable_bytes(made.rstd);
  a.rows = made.rstd.numel();
  a.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(in.shape));
  a.eps = in.eps;
  a.input_type = element_type(in.op, x.scalar_type());
  a.output_type = element_type(in.op, in.type);
  a.weight_type = w.defined() || b.defined() ? element_type(in.op, (w.defined() ? w : b).scalar_type()) : a.input_type;
  if (use_reference((in.centered ? &apex_layer_norm_forward : &apex_rms_norm_forward)(&place, &a), in.op)) return false;
  if (a.hidden == 0) {
    if (made.mean.defined()) made.mean.fill_(std::numeric_limits<double>::quiet_NaN());
    made.rstd.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return true;
}

inline bool run(const Backward& in, const apex_place& place, Gradients& made) {
  const auto prepare = in.centered ? &apex_layer_norm_prepare : &apex_rms_norm_prepare;
  const auto launch = in.centered ? &apex_layer_norm_backward : &apex_rms_norm_backward;
  const at::Tensor grad = in.grad_output.contiguous(), saved = in.saved.contiguous(), more = contiguous(in.grad_sum),
                   mean = contiguous(in.mean), rstd = in.rstd.contiguous(), w = contiguous(in.weight),
                   b = contiguous(in.bias);
  made = made_of(in);
  gpu::NormBackward a{};
  a.grad_output = bytes(grad), a.saved = bytes(saved), a.grad_sum = bytes(more), a.rstd = bytes(rstd);
  a.mean = in.centered && !in.from_output ? bytes(mean) : nullptr;
  a.weight = bytes(w), a.bias = bytes(b), a.grad_input = mutable_bytes(made.input);
  if (in.weight_gradients && w.defined()) a.grad_weight = mutable_bytes(made.weight);
  if (in.weight_gradients && b.defined()) a.grad_bias = mutable_bytes(made.bias);
  TORCH_CHECK_VALUE(!a.grad_bias || a.grad_weight, in.op, ": a bias needs a weight beside it");
  a.rows = rstd.numel();
  a.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(in.shape));
  a.eps = in.eps;
  a.input_type = element_type(in.op, in.type);
  a.output_type = element_type(in.op, grad.scalar_type());
  a.weight_type = w.defined() ? element_type(in.op, w.scalar_type()) : a.input_type;
  a.from_output = in.from_output;
  NormPlan plan;
  if (use_reference(prepare(&place, &a, &plan), in.op)) return false;
  at::Tensor partials;
  if (a.grad_weight && a.parts > 0) {
    partials = at::empty({in.centered ? 2 : 1, a.parts, gpu::norm_partials_pitch(a.hidden)},
                         saved.options().dtype(math_type(in.type)));
    a.partials = mutable_bytes(partials);
  }
  return !use_reference(launch(&place, &a, &plan), in.op);
}
template <class Call> bool launch(const Call& call, const apex_place& place, typename Call::Result& made) {
  std::conditional_t<is_forward<Call>, Outputs, Gradients> found;
  if (!run(arguments(call), place, found)) return false;
  made = results<Call>(found);
  return true;
}

inline Gradients differentiable(const Backward& in) {
  const at::Tensor& input = in.saved;
  const int64_t dims = input.dim(), kept = dims - int64_t(in.shape.size());
  std::vector<int64_t> over, rows;
  for (int64_t d = 0; d < dims; ++d) (d < kept ? rows : over).push_back(d);
  const at::ScalarType math = math_type(in.type);
  const at::Tensor x = input.to(math), dy = in.grad_output.to(math);
  const at::Tensor centred = in.centered ? x - x.mean(over, true) : x;
  const at::Tensor rstd = (centred * centred).mean(over, true).add(in.eps).rsqrt(), normalized = centred * rstd;
  const at::Tensor g = has_value(in.weight) ? dy * in.weight->to(math) : dy;
  at::Tensor grad = g - normalized * (g * normalized).mean(over, true);
  if (in.centered) grad = grad - g.mean(over, true);
  grad = grad * rstd;
  if (has_value(in.grad_sum)) grad = grad + in.grad_sum->to(math);
  const auto over_rows = [&](const at::Tensor& t, const OptionalTensor& w) {
    if (!has_value(w) || !in.weight_gradients) return at::empty({0}, input.options());
    return (rows.empty() ? t : t.sum(rows)).to(w->scalar_type());
  };
  return {grad.to(in.type), over_rows(dy * normalized, in.weight), over_rows(dy, in.bias)};
}
template <class Call> typename Call::Result formula(const Call& call) {
  return results<Call>(differentiable(arguments(call)));
}
}  // namespace norm
}  // namespace apex
