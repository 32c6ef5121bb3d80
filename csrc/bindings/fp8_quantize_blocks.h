#pragma once
#include "generated/fp8_quantize_blocks.h"
#include "fp8.h"

namespace apex {
namespace fp8 {
inline c10::SymInt blocks_of(const c10::SymInt& size) { return (size + (gpu::fp8_block - 1)) / gpu::fp8_block; }
}  // namespace fp8

inline void Fp8QuantizeBlocks::check() const {
  fp8::format_of(name, dtype);
  fp8::type_of(name, input.scalar_type());
  fp8::check_input(name, input);
}
// What is not asked for is empty.
inline Fp8QuantizeBlocks::Result Fp8QuantizeBlocks::outputs() const {
  const c10::SymInt width = input.sym_size(-1), height = fp8::rows_of(input), high = fp8::blocks_of(height),
                    wide = fp8::blocks_of(width);
  const std::vector<c10::SymInt> none{0}, turned{width, height}, square_scales{high, wide}, scales{wide, height},
      turned_scales{high, width};
  return {fp8::empty_like_of(input, rowwise ? input.sym_sizes().vec() : none, *dtype),
          fp8::empty_like_of(input,
                             square    ? square_scales
                             : rowwise ? scales
                                       : none,
                             at::kFloat),
          fp8::empty_like_of(input, columnwise ? turned : none, *dtype),
          fp8::empty_like_of(input, columnwise && !square ? turned_scales : none, at::kFloat)};
}
inline bool Fp8QuantizeBlocks::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = input.contiguous();
  made = outputs();
  auto& [rows, scale_inv, columns, scale_inv_turned] = made;
  gpu::Fp8QuantizeBlocks a{};
  a.input = bytes(x), a.columns = x.size(-1), a.rows = a.columns ? x.numel() / a.columns : 0;
  if (rowwise) a.by_row = mutable_bytes(rows);
  if (columnwise) a.by_column = mutable_bytes(columns);
  a.scale_inv = static_cast<float*>(scale_inv.mutable_data_ptr());
  a.scale_inv_turned = static_cast<float*>(scale_inv_turned.mutable_data_ptr());
  a.epsilon = float(epsilon), a.square = square, a.power_of_two = power_of_two;
  a.type = fp8::type_of(name, x.scalar_type()), a.format = fp8::format_of(name, dtype);
  return !use_reference(apex_fp8_quantize_blocks(&place, &a), unit);
}
}  // namespace apex
