// The CPU variant of bias and activation, at each x86-64 level: tiles that stay in the first-level cache.
#include <algorithm>

#include "activation_cpu.h"
#include "bias_activation.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {
constexpr int64_t block = 4096;  // columns whose biases and sums are held while rows go by

// Parts of rows, each in blocks of columns, these in tiles; of the backward, with the rows' sum for the bias.
template <class Math, bool backward> struct Rows {
  const gpu::BiasActivation& a;
  const bool streamed = is_streamed(a.rows * (backward ? columns_of(a) : a.hidden), a.type);

  // Numbers of a block's columns: a tensor's or, where there is none, one for all.
  struct Numbers {
    const Math* of;
    bool each;
    APEX_INLINE const Math* operator()(int64_t i) const { return of + (each ? i : 0); }
  };
  struct Tiles {
    alignas(64) Math bias[2][block], scale[block], sums[2][block], first[tile], second[tile], gradient[tile],
        made[2][tile], zeros[tile];
    Numbers biases[2], scales;
  };
  APEX_INLINE Numbers numbers_of(const uint8_t* tensor, const TileConversions<Math>& convert, int64_t i, int64_t n,
                                 const Tiles& t, Math* buffer) const {
    if (!tensor) return {t.zeros, false};
    return {load_tile(convert, tensor, a.bias_type, i, n, buffer), true};
  }

  // Elements [i, i + n) of a row; they are [at, at + n) of the block.
  template <class Function> APEX_INLINE void run_forward(const TileConversions<Math>& convert, const Function& f,
                                                         Tiles& t, int64_t row, int64_t i, int64_t at,
                                                         int64_t n) const {
    const int64_t columns = columns_of(a);
    const Math *x = load_tile(convert, a.input, a.type, row * columns + i, n, t.first), *b = t.biases[0](at);
    Math* const y = made_tile(a.output, a.type, row * a.hidden + i, t.made[0], streamed);
    if (a.gated) {
      const Math* gate = load_tile(convert, a.input, a.type, row * columns + a.hidden + i, n, t.second);
      const Math* of_gate = t.biases[1](at);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) y[j] = f(x[j] + b[j]) * (gate[j] + of_gate[j]);
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) y[j] = f(x[j] + b[j]);
    }
    store_tile(convert, a.output, a.type, row * a.hidden + i, n, static_cast<const Math*>(y), streamed);
  }
  // What a bias's gradient and the output have of a row's slopes, where these are not gated.
  APEX_INLINE void store_scaled(const TileConversions<Math>& convert, const Tiles& t, int64_t from, int64_t at,
                                int64_t n, Math* dx) const {
    if (a.unscaled) store_tile(convert, a.unscaled, a.type, from, n, static_cast<const Math*>(dx));
    if (!a.scale) return;
    const Math* scale = t.scales(at);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) dx[j] *= scale[j];
  }
  template <class Function> APEX_INLINE void run_backward(const TileConversions<Math>& convert, const Function& f,
                                                          Tiles& t, int64_t row, int64_t i, int64_t at,
                                                          int64_t n) const {
    const int64_t columns = columns_of(a), from = row * columns + i;
    const Math *x = load_tile(convert, a.input, a.type, from, n, t.first), *b = t.biases[0](at);
    const Math* dy = load_tile(convert, a.grad_output, a.type, row * a.hidden + i, n, t.gradient);
    Math* const of_gate = made_tile(a.output, a.type, from + a.hidden, t.made[1], streamed);
    Math* const dx = made_tile(a.output, a.type, from, t.made[0], streamed);
    if (a.gated) {
      const Math* gate = load_tile(convert, a.input, a.type, from + a.hidden, n, t.second);
      const Math* gate_bias = t.biases[1](at);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        Math slope;
        of_gate[j] = dy[j] * f.template value<true>(x[j] + b[j], slope);
        dx[j] = dy[j] * slope * (gate[j] + gate_bias[j]);
      }
      store_tile(convert, a.output, a.type, from + a.hidden, n, static_cast<const Math*>(of_gate), streamed);
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        Math slope;
        f.template value<true>(x[j] + b[j], slope);
        dx[j] = dy[j] * slope;
      }
    }
    if (a.grad_bias) {
      Math *sums = t.sums[0] + at, *gate_sums = t.sums[1] + at;
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) sums[j] += dx[j];
      if (a.gated) {
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) gate_sums[j] += of_gate[j];
      }
    }
    if (!a.gated) store_scaled(convert, t, from, at, n, dx);
    store_tile(convert, a.output, a.type, from, n, static_cast<const Math*>(dx), streamed);
  }
  // `f`: the activation, of which the function is known here, so that the loops over elements vectorise.
  template <class Function> APEX_INLINE void run_rows(const TileConversions<Math>& convert, const Function& f, Tiles& t,
                                                      int64_t first, int64_t last, Math* partials) const {
    const bool held = a.bias || (backward && (a.scale || a.grad_bias));
    const int64_t step = held ? block : a.hidden;
    for (int64_t begin = 0; begin < a.hidden; begin += step) {
      const int64_t width = std::min<int64_t>(step, a.hidden - begin);
      t.biases[0] = numbers_of(a.bias, convert, begin, width, t, t.bias[0]);
      t.biases[1] = t.biases[0];
      if (a.gated) t.biases[1] = numbers_of(a.bias, convert, a.hidden + begin, width, t, t.bias[1]);
      if (backward) t.scales = numbers_of(a.scale, convert, begin, width, t, t.scale);
      if (partials) std::fill(t.sums[0], t.sums[0] + width, Math(0)), std::fill(t.sums[1], t.sums[1] + width, Math(0));
      for (int64_t row = first; row < last; ++row)
        for (int64_t at = 0; at < width; at += tile) {
          const int64_t n = std::min<int64_t>(tile, width - at);
          if constexpr (backward) run_backward(convert, f, t, row, begin + at, at, n);
          else run_forward(convert, f, t, row, begin + at, at, n);
        }
      for (int64_t k = 0; partials && k < (a.gated ? 2 : 1); ++k)
        copy_bytes(partials + k * a.hidden + begin, t.sums[k], width * int64_t(sizeof(Math)));
    }
  }
  APEX_INLINE int64_t first_row(int64_t part) const { return a.rows * part / a.parts; }
  template <class Function> APEX_INLINE void run_parts(const TileConversions<Math>& convert, const Function& f,
                                                       int64_t begin, int64_t end) const {
    Tiles t;
    std::fill(t.zeros, t.zeros + tile, Math(0));
    if (!(backward && a.grad_bias)) return run_rows(convert, f, t, first_row(begin), first_row(end), nullptr);
    for (int64_t part = begin; part < end; ++part)
      run_rows(convert, f, t, first_row(part), first_row(part + 1),
               reinterpret_cast<Math*>(a.partials) + part * columns_of(a));
  }
  template <int32_t function> APEX_INLINE void run_function(const TileConversions<Math>& convert, int64_t begin,
                                                            int64_t end) const {
    gpu::Activation<Math, true> f(a);
    f.function = function;
    run_parts(convert, f, begin, end);
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    if (a.function == gpu::function_x_sigmoid) run_parts(convert, SigmoidActivation<Math>(a), begin, end);
    else if (a.function == gpu::function_sigmoid) run_function<gpu::function_sigmoid>(convert, begin, end);
    else if (a.function == gpu::function_relu) run_function<gpu::function_relu>(convert, begin, end);
    else run_function<gpu::function_squared_relu>(convert, begin, end);
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
