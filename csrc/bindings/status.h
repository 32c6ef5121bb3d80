// The host library's statuses as the exceptions that torch turns into Python's.
#pragma once
#include <c10/util/Exception.h>

#include "host/apex.h"

namespace apex {
// Returns whether the reference must be run instead; throws for every failure.
inline bool use_reference(int32_t status, const char* op) {
  if (status == APEX_OK) return false;
  if (status == APEX_USE_REFERENCE) return true;
  TORCH_CHECK_TYPE(status != APEX_ERROR_ARGUMENT, apex_last_error());
  TORCH_CHECK_VALUE(status != APEX_ERROR_VALUE, apex_last_error());
  TORCH_CHECK_INDEX(status != APEX_ERROR_INDEX, apex_last_error());
  TORCH_CHECK(false, op, ": ", apex_last_error());
}
}  // namespace apex
