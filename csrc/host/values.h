// Values of the caller's that a CPU can look at before it leaps; elsewhere what they spoil is nan.
#pragma once
#include "apex.h"

namespace apex {
// Element i of int64 (`wide`) or int32.
inline int64_t integer_at(const void* values, int64_t i, bool wide) {
  return wide ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}
}  // namespace apex
