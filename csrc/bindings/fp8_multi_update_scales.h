#pragma once
#include "generated/fp8_multi_update_scales.h"
#include "fp8.h"
#include "host/fp8_multi_update_scales.h"
#include "plain.h"

namespace apex {
namespace fp8 {
inline void check_history(const char* op, const at::Tensor& history, const at::Tensor& first, size_t i) {
  TORCH_CHECK_TYPE(history.scalar_type() == at::kFloat, op, ": amax_histories[", i, "] must be float32, not ",
                   history.scalar_type());
  TORCH_CHECK_VALUE(history.dim() == 2 && history.sym_size(0) >= 1, op, ": amax_histories[", i,
                    "] must be [rows, columns] with at least one row, not ", history.sym_sizes());
  TORCH_CHECK_VALUE(history.sym_size(0) == first.sym_size(0), op, ": amax_histories have ", first.sym_size(0), " and ",
                    history.sym_size(0), " rows");
  if (history.is_meta()) return;
  TORCH_CHECK_VALUE(history.is_contiguous(), op, ": amax_histories[", i, "] must be contiguous");
}
// Histories, and new scales: all are written.
inline void refuse_shared_histories(const char* op, at::TensorList histories, const at::Tensor& scale,
                                    const at::Tensor& scale_inv) {
  std::vector<OutputRange> ranges;
  const auto add = [&](const at::Tensor& written, size_t list, size_t i) {
    const auto begin = reinterpret_cast<uint64_t>(written.const_data_ptr());
    if (written.numel()) ranges.push_back({begin, begin + written.nbytes(), list, i, ranges.size()});
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
inline bool Fp8MultiUpdateScales::launch(const apex_place& place) const {
  if (scales.empty()) return true;
  fp8::refuse_shared_histories(name, amax_histories, scale, scale_inv);
  gpu::Fp8MultiUpdateScales a{};
  a.rows = amax_histories[0].size(0), a.factor = float(std::exp2(-margin)), a.most_recent = most_recent;
  int64_t column = 0;
  for (size_t first = 0; first < scales.size(); first += gpu::fp8_multi_update_most) {
    a.count = int32_t(std::min<size_t>(gpu::fp8_multi_update_most, scales.size() - first));
    a.scale = static_cast<float*>(scale.mutable_data_ptr()) + column;
    a.scale_inv = static_cast<float*>(scale_inv.mutable_data_ptr()) + column;
    a.fp8_max = static_cast<const float*>(fp8_max.const_data_ptr()) + column;
    for (int32_t k = 0; k < a.count; ++k) {
      const at::Tensor& history = amax_histories[first + k];
      a.history[k] = reinterpret_cast<uint64_t>(history.mutable_data_ptr());
      a.old[k] = reinterpret_cast<uint64_t>(fp8::number_of(scales[first + k]));
      a.first[k + 1] = a.first[k] + uint32_t(history.size(1));
    }
    column += a.first[a.count];
    if (use_reference(apex_fp8_multi_update_scales(&place, &a), unit)) return false;
  }
  for (const at::Tensor& history : amax_histories) bump_version(history);
  for (const at::Tensor* written : {&scale, &scale_inv}) bump_version(*written);
  return true;
}
}  // namespace apex
