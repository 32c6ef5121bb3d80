// Element types, as kernels number them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "host/apex.h"

namespace apex {
// apex_dtype of an element type, or -1 for one that no kernel takes.
inline int32_t dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return APEX_F32;
    case at::kHalf:
      return APEX_F16;
    case at::kBFloat16:
      return APEX_BF16;
    case at::kDouble:
      return APEX_F64;
    default:
      return -1;
  }
}
// Likewise; raises TypeError for such a one.
inline int32_t element_type(const char* op, at::ScalarType type) {
  const int32_t code = dtype_code(type);
  TORCH_CHECK_TYPE(code >= 0, op, " takes float32, float16, bfloat16 and float64, not ", type);
  return code;
}

// The type that sums are made in.
inline at::ScalarType math_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }
inline at::ScalarType math_type(const at::Tensor& tensor) { return math_type(tensor.scalar_type()); }
}  // namespace apex
