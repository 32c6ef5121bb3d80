// What FP8 ops share: formats, checks of what is cast, of scales, and of what autograd asks for. They have no
// derivative: modules define that of what they make of them.
#pragma once
#include "checks.h"
#include "host/fp8_quantize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "scalars.h"

namespace apex::fp8 {
inline int32_t format_of(const char* op, std::optional<at::ScalarType> type) {
  const at::ScalarType given = type.value_or(at::ScalarType::Undefined);
  if (given == at::kFloat8_e4m3fn) return gpu::fp8_e4m3fn;
  if (given == at::kFloat8_e5m2) return gpu::fp8_e5m2;
  if (given == at::kFloat8_e4m3fnuz) return gpu::fp8_e4m3fnuz;
  if (given == at::kFloat8_e5m2fnuz) return gpu::fp8_e5m2fnuz;
  TORCH_CHECK_TYPE(false, op,
                   ": the FP8 dtype must be float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz, not ",
                   type ? c10::toString(*type) : "None");
}
inline int32_t type_of(const char* op, at::ScalarType type) {
  const int32_t code = dtype_code(type);
  TORCH_CHECK_TYPE(code >= 0 && code != APEX_F64, op, " takes float32, float16 and bfloat16, not ", type);
  return code;
}
inline void check_input(const char* op, const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 1, op, ": the input must have at least one dimension");
  TORCH_CHECK(!(input.requires_grad() && at::GradMode::is_enabled()), op,
              " has no derivative: call it under torch.no_grad() or in a torch.autograd.Function");
  refuse_forward_mode(op, input);
}
// One float32 number.
inline void check_number(const char* op, const char* what, const at::Tensor& number) {
  TORCH_CHECK_TYPE(number.scalar_type() == at::kFloat, op, ": ", what, " must be float32, not ", number.scalar_type());
  TORCH_CHECK_VALUE(number.sym_numel() == 1, op, ": ", what, " must have one element, not the shape ",
                    number.sym_sizes());
}
// Whether it is so many float32 numbers in memory, one behind the other.
inline bool are_numbers(const at::Tensor& numbers, const c10::SymInt& count) {
  return numbers.scalar_type() == at::kFloat && !numbers.is_meta() && numbers.dim() == 1 &&
         numbers.sym_size(0) == count && (count <= 1 || numbers.sym_stride(0) == 1);
}
// So many float32 numbers, one behind the other. `whose`: as of check_like.
inline void check_numbers(const char* op, const char* what, const at::Tensor& numbers, const c10::SymInt& count,
                          const char* whose = "") {
  TORCH_CHECK_TYPE(numbers.scalar_type() == at::kFloat, op, ": ", what, " must be float32, not ",
                   numbers.scalar_type());
  check_like(op, what, numbers, c10::SymDimVector{count}, std::nullopt, whose);
  if (!numbers.is_meta())
    TORCH_CHECK_VALUE(numbers.numel() <= 1 || numbers.stride(0) == 1, op, ": ", what, " must be contiguous");
}
inline c10::SymInt rows_of(const at::Tensor& tensor) {
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) rows = rows * tensor.sym_size(d);
  return rows;
}
inline at::Tensor empty_like_of(const at::Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType type) {
  return at::empty_symint(sizes, like.options().dtype(type).memory_format(at::MemoryFormat::Contiguous));
}
inline const float* number_of(const at::Tensor& number) { return static_cast<const float*>(number.const_data_ptr()); }
// Of a history [rows, columns]: whether each column lies whole in memory. Histories of layers do, one behind the other.
inline bool is_upright(const at::Tensor& history) {
  const int64_t rows = history.size(0), columns = history.size(1);
  if (rows > 1 && history.stride(0) != 1) return false;
  return columns <= 1 || (history.stride(1) >= rows && history.stride(1) <= UINT32_MAX);
}
// One that is written.
inline float* written_number(const OptionalTensor& number) {
  if (!has_value(number)) return nullptr;
  bump_version(*number);
  return static_cast<float*>(number->mutable_data_ptr());
}
}  // namespace apex::fp8
