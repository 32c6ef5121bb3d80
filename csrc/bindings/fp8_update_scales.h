#pragma once
#include "generated/fp8_update_scales.h"
#include "fp8.h"
#include "plain.h"

namespace apex {
inline void Fp8UpdateScales::check() const {
  TORCH_CHECK_TYPE(amax_history.scalar_type() == at::kFloat, name, ": amax_history must be float32, not ",
                   amax_history.scalar_type());
  TORCH_CHECK_VALUE(amax_history.dim() == 2 && amax_history.sym_size(0) >= 1, name,
                    ": amax_history must be [rows, columns] with at least one row, not ", amax_history.sym_sizes());
  const auto check_numbers = [&](const char* what, const at::Tensor& numbers) {
    fp8::check_numbers(name, what, numbers, amax_history.sym_size(1), "amax_history's columns, ");
  };
  check_numbers("scale", scale), check_numbers("scale_inv", scale_inv), check_numbers("fp8_max", fp8_max);
  if (has_value(reduced)) check_numbers("reduced", *reduced);
  if (amax_history.is_meta()) return;
  TORCH_CHECK_VALUE(amax_history.size(1) <= 1 || amax_history.stride(1) == 1 || fp8::is_upright(amax_history), name,
                    ": the rows of amax_history must be contiguous, or its columns");
  refuse_overlap(amax_history, std::string(name) + ": amax_history");
}
inline bool Fp8UpdateScales::launch(const apex_place& place) const {
  gpu::Fp8UpdateScales a{};
  a.amax_history = static_cast<float*>(amax_history.mutable_data_ptr());
  a.scale = static_cast<float*>(scale.mutable_data_ptr());
  a.scale_inv = static_cast<float*>(scale_inv.mutable_data_ptr());
  a.fp8_max = static_cast<const float*>(fp8_max.const_data_ptr());
  if (has_value(reduced)) a.reduced = static_cast<const float*>(reduced->const_data_ptr());
  a.rows = amax_history.size(0), a.columns = amax_history.size(1);
  const bool upright = fp8::is_upright(amax_history);
  a.pitch = upright ? 1 : amax_history.stride(0), a.column_pitch = upright ? amax_history.stride(1) : 1;
  a.factor = float(std::exp2(-margin)), a.most_recent = most_recent;
  if (use_reference(apex_fp8_update_scales(&place, &a), unit)) return false;
  for (const at::Tensor* written : {&amax_history, &scale, &scale_inv}) bump_version(*written);
  return true;
}
}  // namespace apex
