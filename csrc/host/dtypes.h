// Element types by their number, enum apex_dtype.
#pragma once
#include <cstdint>

#include "device/vectors.h"
#include "host/apex.h"

namespace apex {
template <class T> struct DtypeOf;
template <> struct DtypeOf<float> { static constexpr int32_t value = APEX_F32; };
template <> struct DtypeOf<double> { static constexpr int32_t value = APEX_F64; };
template <> struct DtypeOf<gpu::half> { static constexpr int32_t value = APEX_F16; };
template <> struct DtypeOf<gpu::bfloat16> { static constexpr int32_t value = APEX_BF16; };

// Of an element.
inline int64_t bytes_of(int32_t type) { return gpu::bytes_of(type); }
// Of a sum of elements: a double of doubles, else a float.
constexpr int64_t sum_bytes(int32_t type) { return type == APEX_F64 ? 8 : 4; }
}  // namespace apex
