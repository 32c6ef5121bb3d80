// The CPU variant of bias and activation, at each x86-64 level: tiles that stay in the first-level cache.
#include <algorithm>

#include "bias_activation.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {
// Columns' numbers; `otherwise` where there are none.
template <class Math> APEX_INLINE void load_numbers(const uint8_t* numbers, int32_t type,
                                                    const TileConversions<Math>& convert, int64_t i, int64_t n,
                                                    Math otherwise, Math* x) {
  if (!numbers) std::fill(x, x + n, otherwise);
  else if (const Math* from = load_tile(convert, numbers, type, i, n, x); from != x) std::copy(from, from + n, x);
}

// Parts of rows, each in tiles of columns; of the backward, with the rows' sum for the bias.
template <class Math, bool backward> struct Rows {
  const gpu::BiasActivation& a;

  struct Tiles {
    alignas(64) Math bias[2][tile], scale[tile], sums[2][tile], first[tile], second[tile], gradient[tile],
        made[2][tile];
  };
  template <class Function> APEX_INLINE void run_forward(const TileConversions<Math>& convert, const Function& f,
                                                         Tiles& t, int64_t row, int64_t i, int64_t n) const {
    const int64_t columns = columns_of(a);
    const Math* x = load_tile(convert, a.input, a.type, row * columns + i, n, t.first);
    Math* const y = made_tile(a.output, a.type, row * a.hidden + i, t.made[0]);
    if (a.gated) {
      const Math* gate = load_tile(convert, a.input, a.type, row * columns + a.hidden + i, n, t.second);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) y[j] = f(x[j] + t.bias[0][j]) * (gate[j] + t.bias[1][j]);
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) y[j] = f(x[j] + t.bias[0][j]);
    }
    store_tile(convert, a.output, a.type, row * a.hidden + i, n, static_cast<const Math*>(y));
  }
  template <class Function> APEX_INLINE void run_backward(const TileConversions<Math>& convert, const Function& f,
                                                          Tiles& t, int64_t row, int64_t i, int64_t n) const {
    const int64_t columns = columns_of(a), at = row * columns + i;
    const Math* x = load_tile(convert, a.input, a.type, at, n, t.first);
    const Math* dy = load_tile(convert, a.grad_output, a.type, row * a.hidden + i, n, t.gradient);
    Math* const of_gate = made_tile(a.output, a.type, at + a.hidden, t.made[1]);
    Math* dx = made_tile(a.output, a.type, at, t.made[0]);
    if (a.gated) {
      const Math* gate = load_tile(convert, a.input, a.type, at + a.hidden, n, t.second);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        Math slope;
        of_gate[j] = dy[j] * f.template value<true>(x[j] + t.bias[0][j], slope);
        dx[j] = dy[j] * slope * (gate[j] + t.bias[1][j]);
      }
      store_tile(convert, a.output, a.type, at + a.hidden, n, static_cast<const Math*>(of_gate));
    } else {
      dx = t.made[0];
      for (int64_t j = 0; j < n; ++j) {
        Math slope;
        f.template value<true>(x[j] + t.bias[0][j], slope);
        dx[j] = dy[j] * slope;
      }
    }
    if (a.grad_bias) {
      for (int64_t j = 0; j < n; ++j) t.sums[0][j] += dx[j];
      for (int64_t j = 0; a.gated && j < n; ++j) t.sums[1][j] += of_gate[j];
    }
    if (!a.gated) {
      if (a.unscaled) store_tile(convert, a.unscaled, a.type, at, n, static_cast<const Math*>(dx));
      for (int64_t j = 0; a.scale && j < n; ++j) dx[j] *= t.scale[j];
    }
    store_tile(convert, a.output, a.type, at, n, static_cast<const Math*>(dx));
  }
  // `f`: the activation, of which the function is known here, so that the loops over elements vectorise.
  template <class Function> APEX_INLINE void run_parts(const TileConversions<Math>& convert, const Function& f,
                                                       int64_t begin, int64_t end) const {
    const int64_t columns = columns_of(a);
    Tiles t;
    for (int64_t part = begin; part < end; ++part)
      for (int64_t i = 0; i < a.hidden; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.hidden - i);
        load_numbers(a.bias, a.bias_type, convert, i, n, Math(0), t.bias[0]);
        if (a.gated) load_numbers(a.bias, a.bias_type, convert, a.hidden + i, n, Math(0), t.bias[1]);
        if (backward) load_numbers(a.scale, a.bias_type, convert, i, n, Math(1), t.scale);
        for (int64_t j = 0; j < n; ++j) t.sums[0][j] = t.sums[1][j] = Math(0);
        for (int64_t row = a.rows * part / a.parts; row < a.rows * (part + 1) / a.parts; ++row) {
          if constexpr (backward) run_backward(convert, f, t, row, i, n);
          else run_forward(convert, f, t, row, i, n);
        }
        if (backward && a.grad_bias)
          for (int64_t k = 0; k < (a.gated ? 2 : 1); ++k)
            copy_bytes(reinterpret_cast<Math*>(a.partials) + part * columns + k * a.hidden + i, t.sums[k],
                       n * int64_t(sizeof(Math)));
      }
  }
  template <int32_t function, bool exact> APEX_INLINE void run_function(const TileConversions<Math>& convert,
                                                                        int64_t begin, int64_t end) const {
    gpu::Activation<Math, exact> f(a);
    f.function = function;
    run_parts(convert, f, begin, end);
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const bool half = a.type == APEX_F16 || a.type == APEX_BF16;  // does not see what is lost where not exact
    if (a.function == gpu::function_x_sigmoid)
      half ? run_function<gpu::function_x_sigmoid, sizeof(Math) == 8>(convert, begin, end)
           : run_function<gpu::function_x_sigmoid, true>(convert, begin, end);
    else if (a.function == gpu::function_sigmoid) run_function<gpu::function_sigmoid, true>(convert, begin, end);
    else if (a.function == gpu::function_relu) run_function<gpu::function_relu, true>(convert, begin, end);
    else run_function<gpu::function_squared_relu, true>(convert, begin, end);
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
