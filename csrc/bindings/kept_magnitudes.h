// What 2:4 pruning keeps of groups of eight columns, for each of the 70 ways to take four of them.
#pragma once
#include "generated/kept_magnitudes.h"
#include "checks.h"

namespace apex {
inline void KeptMagnitudes::check() const {
  TORCH_CHECK_TYPE(columns.scalar_type() == at::kFloat, name, " takes float32, not ", columns.scalar_type());
  TORCH_CHECK_TYPE(groups.scalar_type() == at::kInt, name, ": groups are int32, not ", groups.scalar_type());
  TORCH_CHECK_VALUE(columns.dim() == 2 && groups.dim() == 2 && groups.sym_size(1) == gpu::kept_columns, name,
                    ": columns [columns, rows] and groups [groups, 8] do not fit: ", columns.sym_sizes(), ", ",
                    groups.sym_sizes());
}
inline at::Tensor KeptMagnitudes::outputs() const {
  return at::empty_symint({groups.sym_size(0), c10::SymInt(gpu::kept_fours)}, columns.options());
}
inline bool KeptMagnitudes::launch(const apex_place& place, Result& made) const {
  const at::Tensor x = columns.contiguous(), g = groups.contiguous();
  made = at::empty({g.size(0), gpu::kept_fours}, x.options());
  gpu::KeptMagnitudes a{};
  a.columns = x.const_data_ptr<float>(), a.groups = g.const_data_ptr<int32_t>();
  a.sums = made.mutable_data_ptr<float>();
  a.count = x.size(0), a.rows = x.size(1), a.groups_count = g.size(0);
  return !use_reference(apex_kept_magnitudes(&place, &a), unit);
}
}  // namespace apex
