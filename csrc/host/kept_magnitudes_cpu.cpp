// The CPU variant of kept_magnitudes, at each x86-64 level: a register's worth of rows at once.
#include <cmath>
#include <limits>

#include "kept_magnitudes.h"

#include "device/kept_magnitudes.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {
template <int n> struct Lanes {
  typedef float Vector __attribute__((vector_size(n * sizeof(float))));
  Vector v;

  friend APEX_INLINE Lanes operator+(const Lanes& a, const Lanes& b) { return {a.v + b.v}; }
  friend APEX_INLINE Lanes max_number(const Lanes& a, const Lanes& b) { return {b.v > a.v ? b.v : a.v}; }
};

struct KeptOfGroups {
  const gpu::KeptMagnitudes& a;

  APEX_INLINE bool find(int64_t group, const float* (&column)[8]) const {
    for (int c = 0; c < gpu::kept_columns; ++c) {
      const int32_t index = a.groups[group * gpu::kept_columns + c];
      if (index < 0 || index >= a.count) return false;
      column[c] = a.columns + index * a.rows;
    }
    return true;
  }
  template <int n> APEX_INLINE void run_group(const float* const (&column)[8], float* to) const {
    Lanes<n> sums[gpu::kept_fours] = {}, x[gpu::kept_columns];
    for (int64_t row = 0; row < a.rows; row += n) {
      const int64_t left = std::min<int64_t>(n, a.rows - row);
      for (int c = 0; c < gpu::kept_columns; ++c) {
        alignas(64) float values[n] = {};
        if (left == n) __builtin_memcpy(values, column[c] + row, sizeof(values));
        else
          for (int64_t i = 0; i < left; ++i) values[i] = column[c][row + i];
        for (int i = 0; i < n; ++i) values[i] = std::fabs(values[i]);
        __builtin_memcpy(&x[c], values, sizeof(values));
      }
      gpu::add_fours<0>(x, sums);
    }
    for (int four = 0; four < gpu::kept_fours; ++four) {
      float sum = 0.0f;
      for (int i = 0; i < n; ++i) sum += sums[four].v[i];
      to[four] = sum;
    }
  }
  template <int n> APEX_INLINE void run_groups(int64_t begin, int64_t end) const {
    for (int64_t group = begin; group < end; ++group) {
      float* const to = a.sums + group * gpu::kept_fours;
      const float* column[gpu::kept_columns];
      if (find(group, column)) run_group<n>(column, to);
      else std::fill(to, to + gpu::kept_fours, std::numeric_limits<float>::quiet_NaN());
    }
  }
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    if (level >= 4) run_groups<16>(begin, end);
    else run_groups<4>(begin, end);  // g++ splits vectors of eight
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};
}  // namespace

void kept_magnitudes_cpu(const gpu::KeptMagnitudes& a) {
  run_at_level(KeptOfGroups{a}, 0, a.groups_count, std::max<int64_t>(1, elements_per_task / (a.rows * 8 + 1)));
}
}  // namespace apex
