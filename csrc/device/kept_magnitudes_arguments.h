// Arguments of the kept_magnitudes kernel (kept_magnitudes.h), by value: the bindings fill them in.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr int kept_columns = 8, kept_fours = 70, kept_threads = 128;

struct KeptMagnitudes {
  const float* columns;  // [count][rows]
  const i32* groups;     // [groups][8], indices of columns
  float* sums;           // [groups][70]
  i64 count, rows;
  i64 groups_count;
};
}  // namespace gpu
