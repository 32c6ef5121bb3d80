// The CPU variants of the norms: rows in tiles that stay in the first-level cache, at each x86-64 level.
#include <algorithm>
#include <type_traits>

#include "fp8_cpu.h"
#include "device/gpu.h"
#include "device/norm_layout.h"
#include "norm.h"

namespace apex {
namespace {
constexpr int64_t lanes = 16;  // independent sums: they vectorise, and their order is fixed

template <class Math> APEX_INLINE void fill(Math* x, int64_t n, Math value) {
  for (int64_t j = 0; j < n; ++j) x[j] = value;
}
// Of a row, a tile at a time: few roundings come one after the other. All of the row shares what the total loses.
template <class Math> struct RowSum {
  alignas(64) double tiles[lanes] = {};
  // value(j) for j in [0, n).
  template <class Value> APEX_INLINE void add(int64_t n, const Value& value) {
    alignas(64) Math of[lanes] = {};
    int64_t j = 0;
    for (; j + lanes <= n; j += lanes)
      for (int64_t l = 0; l < lanes; ++l) of[l] += value(j + l);
    for (int64_t l = 0; j < n; ++j, ++l) of[l] += value(j);
    for (int64_t l = 0; l < lanes; ++l) tiles[l] += double(of[l]);
  }
  APEX_INLINE double total() const {
    double sum = 0;
    for (int64_t l = 0; l < lanes; ++l) sum += tiles[l];
    return sum;
  }
};

// x^ = (x - mean) * rstd as fma(x - origin, scale, shift). A mean that is large beside the deviation is the origin: the
// difference is exact then, but a product with it would round. Else the difference would, and nothing is taken off.
template <class Math> struct Normalize {
  Math origin, scale, shift;
  APEX_INLINE Normalize(double mean, double rstd)
      : origin(Math(mean * rstd > 1 || mean * rstd < -1 ? mean : 0.0)), scale(Math(rstd)),
        shift(Math((double(origin) - mean) * rstd)) {}
  APEX_INLINE Math operator()(Math x) const { return gpu::fma(x - origin, scale, shift); }
};

template <bool centered, class Math> struct Forward {
  const gpu::NormForward& a;
  const gpu::Fp8Norm* fp8;

  // A tile of the output in FP8; returns the largest magnitude, as record_amax_cpu takes it.
  APEX_INLINE int32_t store_codes(const Math* y, int64_t at, int64_t n, int32_t largest) const {
    if constexpr (std::is_same_v<Math, float>) {
      encode_tile(gpu::Fp8(fp8->format), y, *fp8->scale, n, a.output + at);
      return largest_of_tile(largest, y, n);
    }
    return largest;
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math first[tile], second[tile], third[tile], fourth[tile], moved[tile];
    int32_t largest = 0;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t base = row * a.hidden;
      const void* input = a.input;
      if (a.residual) {
        for (int64_t i = 0; i < a.hidden; i += tile) {
          const int64_t n = std::min<int64_t>(tile, a.hidden - i);
          const Math* x = load_tile(convert, a.input, a.input_type, base + i, n, first);
          const Math* y = load_tile(convert, a.residual, a.input_type, base + i, n, second);
          for (int64_t j = 0; j < n; ++j) third[j] = x[j] + y[j];
          store_tile(convert, a.sum, a.input_type, base + i, n, third);
        }
        input = a.sum;
      }
      double mean = 0;
      if (centered) {
        // Differences from an element: sums of a large mean would round.
        const Math pivot = *load_tile(convert, input, a.input_type, base, 1, first);
        RowSum<Math> sum;
        for (int64_t i = 0; i < a.hidden; i += tile) {
          const int64_t n = std::min<int64_t>(tile, a.hidden - i);
          const Math* x = load_tile(convert, input, a.input_type, base + i, n, first);
          sum.add(n, [&](int64_t j) { return x[j] - pivot; });
        }
        mean = double(pivot) + sum.total() / double(a.hidden);
      }
      RowSum<Math> squares;
      const Math near = Math(mean);
      for (int64_t i = 0; i < a.hidden; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.hidden - i);
        const Math* x = load_tile(convert, input, a.input_type, base + i, n, first);
        squares.add(n, [&](int64_t j) { return (x[j] - near) * (x[j] - near); });
      }
      const double rstd = 1 / gpu::sqrt(squares.total() / double(a.hidden) + a.eps);
      if (centered) reinterpret_cast<Math*>(a.mean)[row] = near;
      reinterpret_cast<Math*>(a.rstd)[row] = Math(rstd);
      const Normalize<Math> normalize(mean, rstd);
      for (int64_t i = 0; i < a.hidden; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.hidden - i);
        const Math* x = load_tile(convert, input, a.input_type, base + i, n, first);
        const Math* w = a.weight ? load_tile(convert, a.weight, a.weight_type, i, n, second) : nullptr;
        const Math* b = centered && a.bias ? load_tile(convert, a.bias, a.weight_type, i, n, fourth) : nullptr;
        if (fp8 && fp8->zero_centered_gamma && w) {
          for (int64_t j = 0; j < n; ++j) moved[j] = w[j] + Math(1);
          w = moved;
        }
        for (int64_t j = 0; j < n; ++j) third[j] = normalize(x[j]);
        if (w && b)
          for (int64_t j = 0; j < n; ++j) third[j] = gpu::fma(third[j], w[j], b[j]);
        else if (w)
          for (int64_t j = 0; j < n; ++j) third[j] *= w[j];
        else if (b)
          for (int64_t j = 0; j < n; ++j) third[j] += b[j];
        if (fp8) largest = store_codes(third, base + i, n, largest);
        else store_tile(convert, a.output, a.output_type, base + i, n, third);
      }
    }
    if (fp8) record_amax_cpu(fp8->amax, largest);
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// Parts of rows, one after the other: each adds its rows' weight gradients up in its own partial sums.
template <bool centered, class Math> struct Backward {
  const gpu::NormBackward& a;

  struct Tile { alignas(64) Math saved[tile], grad[tile], weight[tile], bias[tile], normalized[tile], along[tile]; };
  // Normalised values and g = dy * weight of elements [i, i + n) of a row.
  APEX_INLINE const Math* read(const TileConversions<Math>& convert, Tile& t, int64_t base, int64_t i, int64_t n,
                               const Normalize<Math>& normalize) const {
    const Math* x = load_tile(convert, a.saved, a.from_output ? a.output_type : a.input_type, base + i, n, t.saved);
    const Math* dy = load_tile(convert, a.grad_output, a.output_type, base + i, n, t.grad);
    const Math* w = a.weight ? load_tile(convert, a.weight, a.weight_type, i, n, t.weight) : nullptr;
    if (a.from_output) {
      const Math smallest = Math(a.eps);
      const Math* b = centered && a.bias ? load_tile(convert, a.bias, a.weight_type, i, n, t.bias) : nullptr;
      for (int64_t j = 0; j < n; ++j) {
        const Math weight = w ? w[j] : Math(1), magnitude = std::max(weight < Math(0) ? -weight : weight, smallest);
        t.normalized[j] = (x[j] - (b ? b[j] : Math(0))) / (weight < Math(0) ? -magnitude : magnitude);
      }
    } else {
      for (int64_t j = 0; j < n; ++j) t.normalized[j] = normalize(x[j]);
    }
    if (w)
      for (int64_t j = 0; j < n; ++j) t.along[j] = dy[j] * w[j];
    else
      for (int64_t j = 0; j < n; ++j) t.along[j] = dy[j];
    return dy;
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    Tile t;
    for (int64_t part = begin; part < end; ++part) {
      Math* of_weight =
          a.grad_weight ? reinterpret_cast<Math*>(a.partials) + part * gpu::norm_partials_pitch(a.hidden) : nullptr;
      Math* of_bias = centered && of_weight ? of_weight + a.parts * gpu::norm_partials_pitch(a.hidden) : nullptr;
      if (of_weight) fill(of_weight, a.hidden, Math(0));
      if (of_bias) fill(of_bias, a.hidden, Math(0));
      for (int64_t row = a.rows * part / a.parts; row < a.rows * (part + 1) / a.parts; ++row) {
        const int64_t base = row * a.hidden;
        const Math mean = centered && a.mean ? reinterpret_cast<const Math*>(a.mean)[row] : Math(0);
        const Math rstd = reinterpret_cast<const Math*>(a.rstd)[row];
        const Normalize<Math> normalize(mean, rstd);
        RowSum<Math> along_x, along_one;
        for (int64_t i = 0; i < a.hidden; i += tile) {
          const int64_t n = std::min<int64_t>(tile, a.hidden - i);
          const Math* dy = read(convert, t, base, i, n, normalize);
          if (of_weight)
            for (int64_t j = 0; j < n; ++j) of_weight[i + j] = gpu::fma(dy[j], t.normalized[j], of_weight[i + j]);
          if (of_bias)
            for (int64_t j = 0; j < n; ++j) of_bias[i + j] += dy[j];
          if (centered) along_one.add(n, [&](int64_t j) { return t.along[j]; });
          along_x.add(n, [&](int64_t j) { return t.along[j] * t.normalized[j]; });
        }
        const double scale = double(rstd) / double(a.hidden);
        const Math of_x = Math(along_x.total() * scale), of_one = Math(along_one.total() * scale);
        for (int64_t i = 0; i < a.hidden; i += tile) {
          const int64_t n = std::min<int64_t>(tile, a.hidden - i);
          read(convert, t, base, i, n, normalize);
          for (int64_t j = 0; j < n; ++j)
            t.along[j] = gpu::fma(t.along[j], rstd, -gpu::fma(t.normalized[j], of_x, of_one));
          if (a.grad_sum) {
            const Math* more = load_tile(convert, a.grad_sum, a.input_type, base + i, n, t.saved);
            for (int64_t j = 0; j < n; ++j) t.along[j] += more[j];
          }
          store_tile(convert, a.grad_input, a.input_type, base + i, n, t.along);
        }
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// Tiles of columns: the parts' sums, in order.
template <bool centered, class Math> struct Finish {
  const gpu::NormBackward& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math sums[tile];
    const Math* partials = reinterpret_cast<const Math*>(a.partials);
    for (int which = 0; which < (centered && a.grad_bias ? 2 : 1); ++which)
      for (int64_t i = begin * tile; i < std::min<int64_t>(end * tile, a.hidden); i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.hidden - i);
        fill(sums, n, Math(0));
        for (int64_t part = 0; part < a.parts; ++part) {
          const Math* x = partials + (which * a.parts + part) * gpu::norm_partials_pitch(a.hidden) + i;
          for (int64_t j = 0; j < n; ++j) sums[j] += x[j];
        }
        store_tile(convert, which ? a.grad_bias : a.grad_weight, a.weight_type, i, n, static_cast<const Math*>(sums));
      }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <bool centered, class Math> void forward(const gpu::NormForward& a, const gpu::Fp8Norm* fp8) {
  run_at_level(Forward<centered, Math>{a, fp8}, 0, a.rows, std::max<int64_t>(1, elements_per_task / a.hidden));
}
template <bool centered, class Math> void backward(const gpu::NormBackward& a) {
  const int64_t rows = std::max<int64_t>(1, a.rows / std::max<int64_t>(1, a.parts));
  run_at_level(Backward<centered, Math>{a}, 0, a.parts, std::max<int64_t>(1, elements_per_task / (rows * a.hidden)));
  if (!a.grad_weight) return;
  const int64_t depth = std::max<int64_t>(1, a.parts) * tile;
  run_at_level(Finish<centered, Math>{a}, 0, (a.hidden + tile - 1) / tile,
               std::max<int64_t>(1, elements_per_task / depth));
}
}  // namespace

void norm_forward_cpu(bool centered, const gpu::NormForward& a, const gpu::Fp8Norm* fp8) {
  if (a.input_type == APEX_F64) (centered ? forward<true, double> : forward<false, double>)(a, fp8);
  else (centered ? forward<true, float> : forward<false, float>)(a, fp8);
}
void norm_backward_cpu(bool centered, const gpu::NormBackward& a) {
  if (a.input_type == APEX_F64) (centered ? backward<true, double> : backward<false, double>)(a);
  else (centered ? backward<true, float> : backward<false, float>)(a);
}
}  // namespace apex
