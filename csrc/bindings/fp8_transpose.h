#pragma once
#include "generated/fp8_transpose.h"
#include "fp8.h"

namespace apex {
inline void Fp8Transpose::check() const {
  fp8::format_of(name, input.scalar_type());
  fp8::check_input(name, input);
  if (!bias_gradient) return;
  fp8::type_of(name, dtype.value_or(at::kFloat));
  TORCH_CHECK_VALUE(has_value(scale_inv), name, ": a bias gradient needs scale_inv");
  fp8::check_number(name, "scale_inv", *scale_inv);
}
inline Fp8Transpose::Result Fp8Transpose::outputs() const {
  const std::vector<c10::SymInt> turned{input.sym_size(-1), fp8::rows_of(input)},
      sums{bias_gradient ? input.sym_size(-1) : c10::SymInt(0)};
  return {fp8::empty_like_of(input, turned, input.scalar_type()),
          fp8::empty_like_of(input, sums, dtype.value_or(at::kFloat))};
}
inline bool Fp8Transpose::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = input.contiguous();
  made = outputs();
  auto& [columns, grad_bias] = made;
  gpu::Fp8Transpose a{};
  a.input = bytes(x), a.output = mutable_bytes(columns);
  a.columns = columns.size(0), a.rows = columns.size(1);
  a.format = fp8::format_of(name, x.scalar_type()), a.type = APEX_F32;
  if (bias_gradient) {
    a.scale_inv = fp8::number_of(*scale_inv), a.type = fp8::type_of(name, grad_bias.scalar_type());
    a.grad_bias = mutable_bytes(grad_bias);
  }
  return run_with_workspace(&apex_fp8_transpose, place, a, unit, x.device());
}
}  // namespace apex
