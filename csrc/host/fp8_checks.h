// Checks that the entries of FP8 ops share. `op` is what errors begin with.
#pragma once
#include "apex.h"
#include "device/fp8.h"
#include "status.h"

namespace apex {
inline int32_t check_fp8(const char* op, int32_t type, int32_t format, const void* number, const char* what) {
  if (type < APEX_F32 || type > APEX_BF16)
    return fail(APEX_ERROR_ARGUMENT, "%s takes float32, float16 and bfloat16", op);
  if (format < gpu::fp8_e4m3fn || format > gpu::fp8_e5m2fnuz)
    return fail(APEX_ERROR_ARGUMENT, "%s: the format is none of fp8_e4m3fn, fp8_e5m2, fp8_e4m3fnuz, fp8_e5m2fnuz", op);
  if (!number) return fail(APEX_ERROR_ARGUMENT, "%s: there is no %s", op, what);
  return APEX_OK;
}
inline uintptr_t bits_of(const void* p) { return reinterpret_cast<uintptr_t>(p); }
}  // namespace apex
