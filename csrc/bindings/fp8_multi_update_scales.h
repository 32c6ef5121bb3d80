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
// Histories, and new scales of the caller's: all are written.
inline void refuse_shared_histories(const char* op, at::TensorList histories, at::TensorList new_scales) {
  std::vector<OutputRange> ranges;
  const auto add = [&](const at::Tensor& written, size_t list, size_t i) {
    const auto begin = reinterpret_cast<uint64_t>(written.const_data_ptr());
    const int64_t last = written.dim() == 2 && is_upright(written)
                             ? (written.size(1) - 1) * written.stride(1) + written.size(0) - 1
                             : written.numel() - 1;
    if (written.numel()) ranges.push_back({begin, begin + (last + 1) * sizeof(float), list, i, ranges.size()});
  };
  for (size_t i = 0; i < histories.size(); ++i) add(histories[i], 0, i);
  for (size_t i = 0; i < new_scales.size(); ++i) add(new_scales[i], 1, i);
  const auto describe = [](size_t list, size_t i) {
    return list == 0 ? c10::str("amax_histories[", i, "]") : std::string(i == 0 ? "scale" : "scale_inv");
  };
  refuse_shared(std::move(ranges), describe, c10::str(op, ": "));
}
// All that is read; how many columns histories have together.
inline c10::SymInt check_updates(const char* op, at::TensorList histories, at::TensorList scales,
                                 const at::Tensor& fp8_max) {
  TORCH_CHECK_VALUE(histories.size() == scales.size(), op, ": ", histories.size(), " histories, ", scales.size(),
                    " scales");
  c10::SymInt total = 0;
  for (size_t i = 0; i < scales.size(); ++i) {
    check_history(op, histories[i], histories[0], i);
    const c10::SymInt columns = histories[i].sym_size(1);
    total = total + columns;
    if (are_numbers(scales[i], columns)) continue;  // a name costs more than to ask
    check_numbers(op, c10::str("scales[", i, "]").c_str(), scales[i], columns, "its history's columns, ");
  }
  check_numbers(op, "fp8_max", fp8_max, total, "all histories' columns, ");
  return total;
}
// What an update makes, [all columns]; apart: [all columns][4] or null.
struct NewScales { float *scale, *scale_inv, *apart; };
// False: the reference must run. Versions stay.
inline bool update(const apex_place& place, at::TensorList histories, at::TensorList scales, const at::Tensor& fp8_max,
                   const NewScales& made, double margin, bool most_recent) {
  c10::SmallVector<apex_fp8_history, 8> given;
  for (size_t i = 0; i < scales.size(); ++i) given.push_back(described(histories[i], scales[i]));
  apex_fp8_updates updates{};
  updates.count = int64_t(scales.size()), updates.rows = histories[0].size(0);
  updates.scale = made.scale, updates.scale_inv = made.scale_inv, updates.scale_inv_apart = made.apart;
  updates.fp8_max = number_of(fp8_max);
  updates.factor = float(std::exp2(-margin)), updates.most_recent = most_recent;
  return !use_reference(apex_fp8_multi_update_scales(&place, &updates, given.data()), Fp8MultiUpdateScales::unit);
}
}  // namespace fp8

inline void Fp8MultiUpdateScales::check() const {
  const c10::SymInt total = fp8::check_updates(name, amax_histories, scales, fp8_max);
  fp8::check_numbers(name, "scale", scale, total, "all histories' columns, ");
  fp8::check_numbers(name, "scale_inv", scale_inv, total, "all histories' columns, ");
}
inline bool Fp8MultiUpdateScales::launch(const apex_place& place) const {
  if (scales.empty()) return true;
  fp8::refuse_shared_histories(name, amax_histories, {scale, scale_inv});
  const fp8::NewScales made{static_cast<float*>(scale.mutable_data_ptr()),
                            static_cast<float*>(scale_inv.mutable_data_ptr()), nullptr};
  if (!fp8::update(place, amax_histories, scales, fp8_max, made, margin, most_recent)) return false;
  for (const at::Tensor& history : amax_histories) bump_version(history);
  for (const at::Tensor* written : {&scale, &scale_inv}) bump_version(*written);
  return true;
}
}  // namespace apex
