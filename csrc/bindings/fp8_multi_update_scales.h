#pragma once
#include "generated/fp8_multi_update_scales.h"
#include "fp8.h"
#include "host/fp8_multi_update_scales.h"
#include "plain.h"

namespace apex {
namespace fp8 {
inline apex_fp8_history described(const at::Tensor& history, const at::Tensor& scale) {
  const int64_t rows = history.size(0), columns = history.size(1);
  const bool upright = is_upright(history);
  const int64_t pitch = upright ? 1 : columns, column_pitch = !upright ? 1 : columns > 1 ? history.stride(1) : rows;
  return {static_cast<float*>(history.mutable_data_ptr()), number_of(scale), columns, uint32_t(pitch),
          uint32_t(column_pitch)};
}
inline void check_history(const char* op, const at::Tensor& history, const at::Tensor& first, size_t i) {
  TORCH_CHECK_TYPE(history.scalar_type() == at::kFloat, op, ": amax_histories[", i, "] must be float32, not ",
                   history.scalar_type());
  TORCH_CHECK_VALUE(history.dim() == 2 && history.sym_size(0) >= 1, op, ": amax_histories[", i,
                    "] must be [rows, columns] with at least one row, not ", history.sym_sizes());
  TORCH_CHECK_VALUE(history.sym_size(0) == first.sym_size(0), op, ": amax_histories have ", first.sym_size(0), " and ",
                    history.sym_size(0), " rows");
  if (history.is_meta()) return;
  TORCH_CHECK_VALUE(history.is_contiguous() || is_upright(history), op, ": amax_histories[", i,
                    "] must be contiguous, or each of its columns");
}
// Histories, and new scales: all are written.
inline void refuse_shared_histories(const char* op, at::TensorList histories, const at::Tensor& scale,
                                    const at::Tensor& scale_inv) {
  std::vector<OutputRange> ranges;
  const auto add = [&](const at::Tensor& written, size_t list, size_t i) {
    const auto begin = reinterpret_cast<uint64_t>(written.const_data_ptr());
    const int64_t last = written.dim() == 2 && is_upright(written)
                             ? (written.size(1) - 1) * written.stride(1) + written.size(0) - 1
                             : written.numel() - 1;
    if (written.numel()) ranges.push_back({begin, begin + (last + 1) * sizeof(float), list, i, ranges.size()});
  };
  for (size_t i = 0; i < histories.size(); ++i) add(histories[i], 0, i);
  add(scale, 1, 0), add(scale_inv, 2, 0);
  const auto describe = [](size_t list, size_t i) {
    return list == 0 ? c10::str("amax_histories[", i, "]") : std::string(list == 1 ? "scale" : "scale_inv");
  };
  refuse_shared(std::move(ranges), describe, c10::str(op, ": "));
}
}  // namespace fp8

inline void Fp8MultiUpdateScales::check() const {
  TORCH_CHECK_VALUE(amax_histories.size() == scales.size(), name, ": ", amax_histories.size(), " histories, ",
                    scales.size(), " scales");
  c10::SymInt total = 0;
  for (size_t i = 0; i < scales.size(); ++i) {
    fp8::check_history(name, amax_histories[i], amax_histories[0], i);
    const std::string what = c10::str("scales[", i, "]");
    fp8::check_numbers(name, what.c_str(), scales[i], amax_histories[i].sym_size(1), "its history's columns, ");
    total = total + amax_histories[i].sym_size(1);
  }
  fp8::check_numbers(name, "fp8_max", fp8_max, total, "all histories' columns, ");
  fp8::check_numbers(name, "scale", scale, total, "all histories' columns, ");
  fp8::check_numbers(name, "scale_inv", scale_inv, total, "all histories' columns, ");
}
namespace fp8 {
// False: the reference must run. Versions stay.
inline bool update(const Fp8MultiUpdateScales& c, const apex_place& place) {
  refuse_shared_histories(c.name, c.amax_histories, c.scale, c.scale_inv);
  std::vector<apex_fp8_history> histories;
  histories.reserve(c.scales.size());
  for (size_t i = 0; i < c.scales.size(); ++i) histories.push_back(described(c.amax_histories[i], c.scales[i]));
  apex_fp8_updates updates{};
  updates.count = int64_t(c.scales.size()), updates.rows = c.amax_histories[0].size(0);
  updates.scale = static_cast<float*>(c.scale.mutable_data_ptr());
  updates.scale_inv = static_cast<float*>(c.scale_inv.mutable_data_ptr());
  updates.fp8_max = static_cast<const float*>(c.fp8_max.const_data_ptr());
  updates.factor = float(std::exp2(-c.margin)), updates.most_recent = c.most_recent;
  return !use_reference(apex_fp8_multi_update_scales(&place, &updates, histories.data()), c.unit);
}
}  // namespace fp8

inline bool Fp8MultiUpdateScales::launch(const apex_place& place) const {
  if (scales.empty()) return true;
  if (!fp8::update(*this, place)) return false;
  for (const at::Tensor& history : amax_histories) bump_version(history);
  for (const at::Tensor* written : {&scale, &scale_inv}) bump_version(*written);
  return true;
}
}  // namespace apex
