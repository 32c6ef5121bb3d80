#pragma once
#include "generated/fp8_multi_quantize.h"
#include "fp8.h"
#include "plain.h"

namespace apex {
namespace fp8 {
// An output of matrix i.
inline void check_output(const char* op, const char* what, const at::Tensor& output, c10::SymIntArrayRef sizes,
                         size_t i) {
  format_of(op, output.scalar_type());
  TORCH_CHECK_VALUE(output.sym_sizes() == sizes, op, ": ", what, "[", i, "] has shape ", output.sym_sizes(), ", not ",
                    sizes);
  if (output.is_meta()) return;
  TORCH_CHECK_VALUE(output.is_contiguous(), op, ": ", what, "[", i, "] must be contiguous");
}
inline void refuse_shared_outputs(const char* op, at::TensorList rows, at::TensorList columns) {
  std::vector<OutputRange> ranges;
  for (size_t list = 0; list < 2; ++list) {
    const at::TensorList written = list == 0 ? rows : columns;
    for (size_t i = 0; i < written.size(); ++i) {
      const auto begin = reinterpret_cast<uint64_t>(written[i].const_data_ptr());
      const uint64_t bytes = written[i].numel();
      if (bytes) ranges.push_back({begin, begin + bytes, list, i, 2 * i + list});
    }
  }
  const auto describe = [](size_t list, size_t i) { return c10::str(list == 0 ? "rows" : "columns", "[", i, "]"); };
  refuse_shared(std::move(ranges), describe, c10::str(op, ": "));
}
}  // namespace fp8

inline void Fp8MultiQuantize::check() const {
  TORCH_CHECK_VALUE(!rows.empty() || !columns.empty() || inputs.empty(), name, ": neither rows nor columns are given");
  for (const at::TensorList* list : {&rows, &columns})
    TORCH_CHECK_VALUE(list->empty() || list->size() == inputs.size(), name, ": ", inputs.size(), " inputs, ",
                      list->size(), list == &rows ? " rows" : " columns");
  fp8::check_numbers(name, "scales", scales, int64_t(inputs.size()));
  if (has_value(amaxes)) fp8::check_numbers(name, "amaxes", *amaxes, int64_t(inputs.size()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& x = inputs[i];
    fp8::type_of(name, x.scalar_type());
    fp8::check_input(name, x);
    TORCH_CHECK_TYPE(x.scalar_type() == inputs[0].scalar_type(), name, ": inputs have the dtypes ",
                     inputs[0].scalar_type(), " and ", x.scalar_type());
    const std::vector<c10::SymInt> turned{x.sym_size(-1), fp8::rows_of(x)};
    if (!rows.empty()) fp8::check_output(name, "rows", rows[i], x.sym_sizes(), i);
    if (!columns.empty()) fp8::check_output(name, "columns", columns[i], turned, i);
    for (const at::TensorList* list : {&rows, &columns})
      if (!list->empty())
        TORCH_CHECK_TYPE((*list)[i].scalar_type() == (rows.empty() ? columns : rows)[0].scalar_type(), name,
                         ": outputs must have one dtype");
  }
}
inline bool Fp8MultiQuantize::launch(const apex_place& place) const {
  if (inputs.empty()) return true;
  fp8::refuse_shared_outputs(name, rows, columns);
  gpu::Fp8MultiQuantize a{};
  a.type = fp8::type_of(name, inputs[0].scalar_type());
  a.format = fp8::format_of(name, (rows.empty() ? columns : rows)[0].scalar_type());
  float* const largest = fp8::written_number(amaxes);
  std::vector<at::Tensor> dense(inputs.size());  // as long as the launches need them
  for (size_t first = 0; first < inputs.size(); first += gpu::fp8_multi_most) {
    a.count = int32_t(std::min<size_t>(gpu::fp8_multi_most, inputs.size() - first));
    a.scale = fp8::number_of(scales) + first, a.amax = largest ? largest + first : nullptr;
    for (int32_t k = 0; k < a.count; ++k) {
      const size_t i = first + k;
      const at::Tensor& x = dense[i] = inputs[i].contiguous();
      a.input[k] = reinterpret_cast<uint64_t>(bytes(x));
      a.by_row[k] = rows.empty() ? 0 : reinterpret_cast<uint64_t>(mutable_bytes(rows[i]));
      a.by_column[k] = columns.empty() ? 0 : reinterpret_cast<uint64_t>(mutable_bytes(columns[i]));
      a.columns[k] = x.size(-1), a.rows[k] = x.size(-1) ? x.numel() / x.size(-1) : 0;
    }
    if (use_reference(apex_fp8_multi_quantize(&place, &a), unit)) return false;
  }
  for (const at::TensorList* list : {&rows, &columns})
    for (const at::Tensor& written : *list) bump_version(written);
  return true;
}
}  // namespace apex
