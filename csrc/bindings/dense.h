// A layer of a perceptron, and what dense_gelu_dense shares with it. Where the vendor's BLAS serves, libapex runs it;
// else torch's products do, from here: the reference, which is the same in Python, takes 70 us of the host.
#pragma once
#include "generated/dense.h"
#include "bias_activation.h"
#include "products.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

namespace apex {
namespace dense {
inline int32_t activation_of(c10::string_view name) {
  if (name == "none") return APEX_ACTIVATION_NONE;
  if (name == "relu") return APEX_ACTIVATION_RELU;
  if (name == "sigmoid") return APEX_ACTIVATION_SIGMOID;
  if (name == "gelu") return APEX_ACTIVATION_GELU;
  TORCH_CHECK_VALUE(false, "dense: the activation must be none, relu, sigmoid or gelu, not '", name, "'");
}

inline void check_layer(const char* op, const at::Tensor& input, const c10::SymInt& inputs, const at::Tensor& weight,
                        const OptionalTensor& bias) {
  element_type(op, input.scalar_type());
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(1) == inputs, op, ": a weight has shape ", weight.sym_sizes(),
                    ", not [outputs, ", inputs, "]");
  TORCH_CHECK_VALUE(!has_value(bias) || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)), op,
                    ": a bias has shape ", bias->sym_sizes(), " but the weight ", weight.sym_size(0), " outputs");
  for (const at::Tensor* tensor : {&weight, has_value(bias) ? &*bias : &weight}) {
    TORCH_CHECK_TYPE(tensor->scalar_type() == input.scalar_type(), op, ": tensors must have one dtype, not ",
                     input.scalar_type(), " and ", tensor->scalar_type());
  }
}
inline void check_input(const char* op, const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 1, op, ": the input must have at least one dimension");
}
inline c10::SymDimVector sizes_behind(const at::Tensor& input, const at::Tensor& weight) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes.back() = weight.sym_size(0);
  return sizes;
}
inline at::Tensor output_of(const at::Tensor& input, const at::Tensor& weight) {
  return at::empty_symint(sizes_behind(input, weight), input.options());
}
inline at::Tensor gradient_of(const at::Tensor& tensor, bool wanted) {
  return wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options()) : no_elements(tensor);
}
inline bool keeps_before(int32_t activation) {
  return activation == APEX_ACTIVATION_SIGMOID || activation == APEX_ACTIVATION_GELU;
}

// What the layer multiplies, dense.
struct Operands {
  at::Tensor input, weight, bias;
  Operands(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& b)
      : input(x.contiguous()), weight(w.contiguous()), bias(contiguous(b)) {}

  apex_dense layer(int32_t activation) const {
    apex_dense d{};
    d.input = bytes(input), d.weight = bytes(weight), d.bias = bytes(bias);
    d.inputs = weight.size(1), d.outputs = weight.size(0);
    d.rows = d.inputs ? input.numel() / d.inputs : 0;
    d.type = element_type("dense", input.scalar_type());
    d.activation = activation;
    return d;
  }
};
using Direction = int32_t (*)(const apex_place*, const apex_dense*, const apex_workspace*);
// False: the reference must run.
inline bool run(const apex_place& place, const apex_dense& d, Direction direction, const at::Tensor& like,
                const char* op) {
  Workspace workspace(like.device());
  const int32_t status = direction(&place, &d, workspace.lent());
  return !products::ran_out(workspace) && !products::was_refused(place, status, op);
}

// ---- by torch's ops, differentiable
inline at::Tensor product(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& b) {
  return at::linear(x, w, b).contiguous();
}
inline at::Tensor activated(const at::Tensor& x, int32_t activation) {
  if (activation == APEX_ACTIVATION_RELU) return at::relu(x);
  if (activation == APEX_ACTIVATION_SIGMOID) return at::sigmoid(x);
  return activation == APEX_ACTIVATION_GELU ? at::gelu(x, "tanh") : x;
}
// The gradient behind an activation as one of what that was taken of, or of ReLU, whose slope is the same, of its
// result.
inline at::Tensor before_activation(const at::Tensor& g, const at::Tensor& kept, c10::string_view activation) {
  const at::Tensor wide = kept.to(c10::promoteTypes(kept.scalar_type(), at::kFloat));
  return (g * act::value_and_slope(wide, act::function_of(activation)).second).to(g.scalar_type());
}
inline at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.dim() > 1 ? tensor.flatten(0, -2) : tensor.unsqueeze(0);
}
struct Gradients { at::Tensor input, weight, bias; };
inline Gradients gradients(const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, const OptionalTensor& b,
                           bool of_input, bool of_weight, bool of_bias) {
  const at::Tensor rows = rows_of(g);
  return {of_input ? at::matmul(g, w).contiguous() : no_elements(x),
          of_weight ? at::matmul(rows.t(), rows_of(x)).contiguous() : no_elements(w),
          of_bias && has_value(b) ? rows.sum(0) : no_elements(x)};
}

inline bool ask_vendor(const DenseForward& c, const apex_place& place, DenseForward::Result& made) {
  if (!products::may_ask_vendor(place, c.input.scalar_type())) return false;
  const Operands operands(c.input, c.weight, c.bias);
  apex_dense d = operands.layer(activation_of(c.activation));
  made = c.outputs();
  d.output = mutable_bytes(std::get<0>(made)), d.before = mutable_bytes(std::get<1>(made));
  return run(place, d, &apex_dense_forward, c.input, c.unit);
}
inline bool ask_vendor(const DenseBackward& c, const apex_place& place, DenseBackward::Result& made) {
  if (!products::may_ask_vendor(place, c.input.scalar_type())) return false;
  const Operands operands(c.input, c.weight, c.bias);
  const at::Tensor g = c.grad_output.contiguous(), kept = c.saved.contiguous();
  apex_dense d = operands.layer(activation_of(c.activation));
  made = c.outputs();
  const auto& [grad_input, grad_weight, grad_bias] = made;
  d.output = d.before = const_cast<uint8_t*>(bytes(kept));
  d.grad_output = bytes(g);
  d.grad_input = c.of_input ? mutable_bytes(grad_input) : nullptr;
  d.grad_weight = c.of_weight ? mutable_bytes(grad_weight) : nullptr;
  d.grad_bias = c.of_bias && has_value(c.bias) ? mutable_bytes(grad_bias) : nullptr;
  return run(place, d, &apex_dense_backward, c.input, c.unit);
}
}  // namespace dense

inline void DenseForward::check() const {
  dense::activation_of(activation);
  dense::check_input(unit, input);
  dense::check_layer(unit, input, input.sym_size(-1), weight, bias);
}
inline DenseForward::Result DenseForward::outputs() const {
  const bool keeps = dense::keeps_before(dense::activation_of(activation));
  return {dense::output_of(input, weight), keeps ? dense::output_of(input, weight) : no_elements(input)};
}
inline bool DenseForward::launch(const apex_place& place, Result& made) const {
  if (dense::ask_vendor(*this, place, made)) return true;
  const auto no_autocast = without_autocast();
  const int32_t kind = dense::activation_of(activation);
  const at::Tensor before = dense::product(input, weight, bias);
  made = {dense::activated(before, kind), dense::keeps_before(kind) ? before : no_elements(input)};
  return true;
}

inline void DenseBackward::check() const {
  const int32_t kind = dense::activation_of(activation);
  dense::check_input(unit, input);
  dense::check_layer(unit, input, input.sym_size(-1), weight, bias);
  check_like(unit, "the gradient", grad_output, dense::sizes_behind(input, weight), input.scalar_type());
  if (kind != APEX_ACTIVATION_NONE)
    check_like(unit, "what the forward kept", saved, dense::sizes_behind(input, weight), input.scalar_type());
}
inline DenseBackward::Result DenseBackward::outputs() const {
  return {dense::gradient_of(input, of_input), dense::gradient_of(weight, of_weight),
          has_value(bias) ? dense::gradient_of(*bias, of_bias) : no_elements(input)};
}
inline bool DenseBackward::launch(const apex_place& place, Result& made) const {
  if (dense::ask_vendor(*this, place, made)) return true;
  const auto no_autocast = without_autocast();
  const bool plain = dense::activation_of(activation) == APEX_ACTIVATION_NONE;
  const at::Tensor g = plain ? grad_output : dense::before_activation(grad_output, saved, activation);
  const auto found = dense::gradients(g, input, weight, bias, of_input, of_weight, of_bias);
  made = {found.input, found.weight, found.bias};
  return true;
}
inline DenseBackward::Result DenseBackward::formula() const {
  const bool plain = dense::activation_of(activation) == APEX_ACTIVATION_NONE;
  const at::Tensor g =
      plain ? grad_output : dense::before_activation(grad_output, dense::product(input, weight, bias), activation);
  const auto made = dense::gradients(g, input, weight, bias, of_input, of_weight, of_bias);
  return {made.input, made.weight, made.bias};
}
}  // namespace apex
