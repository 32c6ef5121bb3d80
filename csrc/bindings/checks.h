// Checks that several ops share, in one form of words. All work with symbolic sizes.
#pragma once
#include "functional.h"
#include "workspace.h"

namespace apex {
// Throws unless a tensor has these sizes, and that dtype if one is asked for: kernels read as much of it as another
// one's shape says. The dispatcher passes None for a tensor that an op needs, too. whose: as "the input's ".
inline void check_like(const char* op, const char* name, const at::Tensor& tensor, c10::SymIntArrayRef sizes,
                       std::optional<at::ScalarType> type, const char* whose = "") {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": ", name, " must be a tensor, not None");
  TORCH_CHECK_VALUE(tensor.sym_sizes() == sizes, op, ": ", name, " has shape ", tensor.sym_sizes(), ", not ", whose,
                    sizes);
  TORCH_CHECK_TYPE(!type || tensor.scalar_type() == *type, op, ": ", name, " has dtype ", tensor.scalar_type(),
                   ", not ", whose, *type);
}
inline void check_like(const char* op, const char* name, const OptionalTensor& tensor, c10::SymIntArrayRef sizes,
                       std::optional<at::ScalarType> type, const char* whose = "") {
  if (has_value(tensor)) check_like(op, name, *tensor, sizes, type, whose);
}
// `verb`: of the name.
inline void check_integers(const char* op, const char* name, const at::Tensor& tensor, const char* verb = " is") {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt, op, ": ", name, verb,
                   " int64 or int32, not ", tensor.scalar_type());
}
inline c10::SymDimVector with_last(c10::SymIntArrayRef sizes, int64_t last) {
  c10::SymDimVector found(sizes.begin(), sizes.end());
  found.emplace_back(last);
  return found;
}
// A class for each row of logits.
inline void check_classes(const char* op, const at::Tensor& logits, const char* name, const at::Tensor& labels) {
  element_type(op, logits.scalar_type());
  TORCH_CHECK_VALUE(logits.dim() >= 1 && labels.sym_sizes() == logits.sym_sizes().slice(0, logits.dim() - 1), op,
                    ": logits of shape ", logits.sym_sizes(), " need ", name,
                    " of the same shape without the last dimension, not ", labels.sym_sizes());
  check_integers(op, name, labels, " are");
}
inline void check_seed(const char* op, double dropout, const OptionalTensor& seed, const at::Tensor& input) {
  TORCH_CHECK_VALUE(dropout == 0 || (has_value(seed) && seed->scalar_type() == at::kLong && seed->sym_numel() == 1), op,
                    ": dropout needs a seed, one int64 on ", input.device());
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
// Of weights and what goes with them: without elements where it is not wanted, or they are not there.
inline at::Tensor gradient_like(const OptionalTensor& tensor, bool wanted, const at::Tensor& beside) {
  return has_value(tensor) && wanted ? at::empty_symint(tensor->sym_sizes(), tensor->options()) : no_elements(beside);
}
inline void check_affine(const char* op, const OptionalTensor& weight, const OptionalTensor& bias,
                         const at::Tensor& input, const c10::SymInt& channels) {
  for (const OptionalTensor* w : {&weight, &bias}) {
    if (!has_value(*w)) continue;
    const char* name = w == &weight ? "weight" : "bias";
    check_like(op, name, *w, c10::SymDimVector{channels}, std::nullopt, "a number each channel, ");
    check_math(op, name, **w, input);
  }
  check_one_dtype(op, weight, bias);
}
}  // namespace apex
