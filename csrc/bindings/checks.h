// Checks that several ops share, in one form of words. All work with symbolic sizes.
#pragma once
#include "functional.h"

namespace apex {
inline void check_device(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& input) {
  TORCH_CHECK_VALUE(tensor.device() == input.device(), op, ": ", name, " is on ", tensor.device(),
                    " but the input is on ", input.device());
}
// `verb`: of the name.
inline void check_integers(const char* op, const char* name, const at::Tensor& tensor, const char* verb = " is") {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt, op, ": ", name, verb,
                   " int64 or int32, not ", tensor.scalar_type());
}
// Sums of float64 are made in float64, all others in float32.
inline void check_math(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& input) {
  element_type(op, tensor.scalar_type());
  TORCH_CHECK_TYPE((tensor.scalar_type() == at::kDouble) == (input.scalar_type() == at::kDouble), op,
                   ": float64 goes with float64 alone: the input is ", input.scalar_type(), ", the ", name, " ",
                   tensor.scalar_type());
}
inline void check_one_dtype(const char* op, const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK_TYPE(!has_value(weight) || !has_value(bias) || weight->scalar_type() == bias->scalar_type(), op,
                   ": weight and bias must have one dtype");
}
// A gradient of that shape, with the input's dtype, beside it.
inline void check_gradient_of(const char* op, const at::Tensor& gradient, c10::SymIntArrayRef sizes,
                              const at::Tensor& input) {
  TORCH_CHECK_VALUE(gradient.sym_sizes() == sizes && gradient.device() == input.device(), op,
                    ": the gradient has shape ", gradient.sym_sizes(), " on ", gradient.device(), ", not ", sizes,
                    " on ", input.device());
  TORCH_CHECK_TYPE(gradient.scalar_type() == input.scalar_type(), op, ": the gradient is ", gradient.scalar_type(),
                   ", not ", input.scalar_type());
}
// One number a channel.
inline void check_per_channel(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& input,
                              const c10::SymInt& channels) {
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.sym_size(0) == channels, op, ": ", name, " has shape ",
                    tensor.sym_sizes(), " but the input has ", channels, " channels");
  check_device(op, name, tensor, input);
}
inline void check_affine(const char* op, const OptionalTensor& weight, const OptionalTensor& bias,
                         const at::Tensor& input, const c10::SymInt& channels) {
  for (const OptionalTensor* w : {&weight, &bias}) {
    if (!has_value(*w)) continue;
    const char* name = w == &weight ? "weight" : "bias";
    check_per_channel(op, name, **w, input, channels);
    check_math(op, name, **w, input);
  }
  check_one_dtype(op, weight, bias);
}
}  // namespace apex
