#pragma once
#include "generated/fp8_dequantize.h"
#include "fp8.h"

namespace apex {
inline void Fp8Dequantize::check() const {
  fp8::format_of(name, input.scalar_type());
  fp8::type_of(name, dtype.value_or(at::kFloat));
  fp8::check_input(name, input);
  fp8::check_number(name, "scale_inv", scale_inv);
}
inline at::Tensor Fp8Dequantize::outputs() const {
  return fp8::empty_like_of(input, input.sym_sizes(), dtype.value_or(at::kFloat));
}
inline bool Fp8Dequantize::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = input.contiguous();
  made = outputs();
  gpu::Fp8Dequantize a{};
  a.input = bytes(x), a.scale_inv = fp8::number_of(scale_inv), a.output = mutable_bytes(made), a.count = x.numel();
  a.type = fp8::type_of(name, made.scalar_type()), a.format = fp8::format_of(name, x.scalar_type());
  return !use_reference(apex_fp8_dequantize(&place, &a), unit);
}
}  // namespace apex
