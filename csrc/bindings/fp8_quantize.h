#pragma once
#include "generated/fp8_quantize.h"
#include "bias_activation.h"
#include "fp8.h"

namespace apex {
namespace fp8 {
inline bool halves(const Fp8Quantize& c) { return c.gated && !has_value(c.before); }
inline bool doubles(const Fp8Quantize& c) { return c.gated && has_value(c.before); }
// Of what is cast.
inline std::vector<c10::SymInt> sizes_of(const Fp8Quantize& c) {
  auto sizes = c.input.sym_sizes().vec();
  if (halves(c)) sizes.back() = sizes.back() / 2;
  if (doubles(c)) sizes.back() = sizes.back() * 2;
  return sizes;
}
inline gpu::Fp8Quantize arguments_of(const Fp8Quantize& c, const at::Tensor& x) {
  gpu::Fp8Quantize a{};
  a.input = bytes(x), a.amax = written_number(c.amax);
  if (has_value(c.scale)) a.scale = number_of(*c.scale);
  a.epsilon = float(c.epsilon), a.power_of_two = c.power_of_two;
  a.columns = x.size(-1) / (halves(c) ? 2 : 1), a.rows = x.size(-1) ? x.numel() / x.size(-1) : 0;
  a.type = type_of(c.name, x.scalar_type()), a.format = format_of(c.name, c.dtype);
  if (c.activation == "none") return a;
  const auto f = activation::function_of(c.activation);
  a.slope = f.slope, a.cubic = f.cubic, a.function = f.kind, a.gated = c.gated;
  a.source = has_value(c.before) ? gpu::fp8_of_gradient : gpu::fp8_of_activation;
  return a;
}
}  // namespace fp8

inline void Fp8Quantize::check() const {
  fp8::format_of(name, dtype);
  fp8::type_of(name, input.scalar_type());
  fp8::check_input(name, input);
  if (has_value(scale)) fp8::check_number(name, "scale", *scale);
  if (has_value(amax)) fp8::check_number(name, "amax", *amax);
  if (activation == "none") {
    TORCH_CHECK_VALUE(!gated && !has_value(before), name, ": without an activation there is no `before`, and no gate");
    return;
  }
  activation::function_of(activation);
  TORCH_CHECK_VALUE(!fp8::halves(*this) || input.sym_size(-1) % 2 == 0, name,
                    ": a gated activation halves the last dimension, which is ", input.sym_size(-1));
  TORCH_CHECK_VALUE(has_value(before) || !bias_gradient, name,
                    ": a bias gradient is of a gradient, not of an activation: give `before`");
  if (!has_value(before)) return;
  TORCH_CHECK_TYPE(before->scalar_type() == input.scalar_type(), name, ": `before` is ", before->scalar_type(),
                   " but the input ", input.scalar_type());
  check_like(name, "`before`", *before, fp8::sizes_of(*this), std::nullopt);
}
// What is not asked for is empty.
inline Fp8Quantize::Result Fp8Quantize::outputs() const {
  const auto sizes = fp8::sizes_of(*this);
  const auto made = [&](bool wanted, c10::SymIntArrayRef of, at::ScalarType type) {
    return wanted ? fp8::empty_like_of(input, of, type) : no_elements(input, type);
  };
  return {made(rowwise, sizes, *dtype), made(columnwise, c10::SymDimVector{sizes.back(), fp8::rows_of(input)}, *dtype),
          made(bias_gradient, c10::SymDimVector{sizes.back()}, input.scalar_type()),
          made(!has_value(scale), {}, at::kFloat)};
}
inline bool Fp8Quantize::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = input.contiguous(), u = contiguous(before);
  made = outputs();
  auto& [rows, columns, grad_bias, scale_inv] = made;
  gpu::Fp8Quantize a = fp8::arguments_of(*this, x);
  a.before = bytes(u);
  if (rowwise) a.by_row = mutable_bytes(rows);
  if (columnwise) a.by_column = mutable_bytes(columns);
  if (bias_gradient) a.grad_bias = mutable_bytes(grad_bias);
  if (!a.scale) a.scale_inv = static_cast<float*>(scale_inv.mutable_data_ptr());
  if (!a.scale && x.numel() == 0) scale_inv.fill_(1.0f);
  return run_with_workspace(&apex_fp8_quantize, place, a, unit, x.device());
}
}  // namespace apex
