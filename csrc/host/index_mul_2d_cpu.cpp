// The CPU variant of index_mul_2d, at each x86-64 level: rows in tiles that stay in the first-level cache.
#include <algorithm>
#include <limits>

#include "index_mul_2d.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {

template <class Math> struct Gather {
  const gpu::IndexMul2d& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math first[tile], second[tile], made[tile];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t index = a.wide_index ? reinterpret_cast<const int64_t*>(a.index)[row]
                                         : reinterpret_cast<const int32_t*>(a.index)[row];
      const bool inside = index >= 0 && index < a.entries;
      for (int64_t i = 0; i < a.features; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.features - i);
        const Math* y = load_tile(convert, a.b, a.type, row * a.features + i, n, second);
        Math* const product = made_tile(a.out, a.type, row * a.features + i, made);
        if (inside) {
          const Math* x = load_tile(convert, a.a, a.type, index * a.features + i, n, first);
#pragma GCC ivdep
          for (int64_t j = 0; j < n; ++j) product[j] = x[j] * y[j];
        } else {
          std::fill(product, product + n, std::numeric_limits<Math>::quiet_NaN());
        }
        store_tile(convert, a.out, a.type, row * a.features + i, n, static_cast<const Math*>(product));
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Math> struct Scatter {
  const gpu::IndexMul2d& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const int64_t* order = reinterpret_cast<const int64_t*>(a.order);
    const int64_t* begins = reinterpret_cast<const int64_t*>(a.begins);
    alignas(64) Math first[tile], second[tile], sum[tile];
    for (int64_t entry = begin; entry < end; ++entry)
      for (int64_t i = 0; i < a.features; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.features - i);
        std::fill(sum, sum + n, Math(0));
        for (int64_t k = begins[entry]; k < begins[entry + 1]; ++k) {
          const int64_t from = order[k] * a.features + i;
          const Math* x = load_tile(convert, a.a, a.type, from, n, first);
          const Math* y = load_tile(convert, a.b, a.type, from, n, second);
          for (int64_t j = 0; j < n; ++j) sum[j] += x[j] * y[j];
        }
        store_tile(convert, a.out, a.type, entry * a.features + i, n, static_cast<const Math*>(sum));
      }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Work> void run(const gpu::IndexMul2d& a, int64_t rows, int64_t depth) {
  run_at_level(Work{a}, 0, rows, std::max<int64_t>(1, elements_per_task / (a.features * std::max<int64_t>(1, depth))));
}
}  // namespace

void index_mul_2d_gather_cpu(const gpu::IndexMul2d& a) {
  a.type == APEX_F64 ? run<Gather<double>>(a, a.rows, 1) : run<Gather<float>>(a, a.rows, 1);
}
void index_mul_2d_scatter_cpu(const gpu::IndexMul2d& a) {
  const int64_t depth = a.rows / a.entries;
  a.type == APEX_F64 ? run<Scatter<double>>(a, a.entries, depth) : run<Scatter<float>>(a, a.entries, depth);
}
}  // namespace apex
