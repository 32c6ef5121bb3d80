// The CPU variant of bias and activation, at each x86-64 level: tiles that stay in the first-level cache.
#include <algorithm>
#include <cstring>

#include "bias_activation.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {
// Columns' numbers; `otherwise` where there are none.
template <class Math> APEX_INLINE void load_numbers(const uint8_t* numbers, int32_t type,
                                                    const TileConversions<Math>& convert, int64_t i, int64_t n,
                                                    Math otherwise, Math* x) {
  if (!numbers) std::fill(x, x + n, otherwise);
  else if (type == DtypeOf<Math>::value)
    std::memcpy(x, reinterpret_cast<const Math*>(numbers) + i, size_t(n) * sizeof(Math));
  else convert.load[type](x, numbers, i, n);
}

// Parts of rows, each in tiles of columns; of the backward, with the rows' sum for the bias.
template <class Math, bool backward> struct Rows {
  const gpu::BiasActivation& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const gpu::Activation<Math, true> f(a);
    const int64_t columns = columns_of(a);
    alignas(64) Math bias[2][tile], scale[tile], sums[2][tile], first[tile], second[tile], gradient[tile],
        made[2][tile];
    for (int64_t part = begin; part < end; ++part)
      for (int64_t i = 0; i < a.hidden; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.hidden - i);
        load_numbers(a.bias, a.bias_type, convert, i, n, Math(0), bias[0]);
        if (a.gated) load_numbers(a.bias, a.bias_type, convert, a.hidden + i, n, Math(0), bias[1]);
        if (backward) load_numbers(a.scale, a.bias_type, convert, i, n, Math(1), scale);
        for (int64_t j = 0; j < n; ++j) sums[0][j] = sums[1][j] = Math(0);
        for (int64_t row = a.rows * part / a.parts; row < a.rows * (part + 1) / a.parts; ++row) {
          const Math* x = load_tile(convert, a.input, a.type, row * columns + i, n, first);
          const Math* gate =
              a.gated ? load_tile(convert, a.input, a.type, row * columns + a.hidden + i, n, second) : nullptr;
          if constexpr (!backward) {
            for (int64_t j = 0; j < n; ++j) made[0][j] = f(x[j] + bias[0][j]);
            if (gate)
              for (int64_t j = 0; j < n; ++j) made[0][j] *= gate[j] + bias[1][j];
            store_tile(convert, a.output, a.type, row * a.hidden + i, n, static_cast<const Math*>(made[0]));
          } else {
            const Math* dy = load_tile(convert, a.grad_output, a.type, row * a.hidden + i, n, gradient);
            for (int64_t j = 0; j < n; ++j) {
              Math slope;
              made[1][j] = dy[j] * f.template value<true>(x[j] + bias[0][j], slope);
              made[0][j] = dy[j] * slope;
            }
            if (gate)
              for (int64_t j = 0; j < n; ++j) made[0][j] *= gate[j] + bias[1][j];
            for (int64_t k = 0; k < (gate ? 2 : 1); ++k) {
              for (int64_t j = 0; j < n; ++j) sums[k][j] += made[k][j];
              if (!gate) {
                if (a.unscaled)
                  store_tile(convert, a.unscaled, a.type, row * columns + i, n, static_cast<const Math*>(made[0]));
                for (int64_t j = 0; j < n; ++j) made[0][j] *= scale[j];
              }
              store_tile(convert, a.output, a.type, row * columns + k * a.hidden + i, n,
                         static_cast<const Math*>(made[k]));
            }
          }
        }
        if (backward && a.grad_bias)
          for (int64_t k = 0; k < (a.gated ? 2 : 1); ++k)
            std::memcpy(reinterpret_cast<Math*>(a.partials) + part * columns + k * a.hidden + i, sums[k],
                        size_t(n) * sizeof(Math));
      }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};
template <class Math> void sum_parts(const gpu::BiasActivation& a) {
  const int64_t columns = columns_of(a);
  for (int64_t column = 0; column < columns; ++column) {
    Math total[1] = {Math(0)};
    for (int64_t part = 0; part < a.parts; ++part)
      total[0] += reinterpret_cast<const Math*>(a.partials)[part * columns + column];
    gpu::store_values(a.grad_bias, a.bias_type, column, total);
  }
}
template <class Math, bool backward> void run_cpu(const gpu::BiasActivation& a) {
  const int64_t part_elements = std::max<int64_t>(1, a.rows / std::max<int64_t>(1, a.parts) * a.hidden);
  run_at_level(Rows<Math, backward>{a}, 0, a.parts, std::max<int64_t>(1, elements_per_task / part_elements));
  if (backward && a.grad_bias) sum_parts<Math>(a);
}
}  // namespace

void bias_activation_forward_cpu(const gpu::BiasActivation& a) {
  a.type == APEX_F64 ? run_cpu<double, false>(a) : run_cpu<float, false>(a);
}
void bias_activation_backward_cpu(const gpu::BiasActivation& a) {
  a.type == APEX_F64 ? run_cpu<double, true>(a) : run_cpu<float, true>(a);
}
}  // namespace apex
