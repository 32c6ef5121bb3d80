// The CPU variants of the norms: rows in tiles that stay in the first-level cache, at each x86-64 level.
#include <algorithm>
#include <type_traits>

#include "fp8_cpu.h"
#include "device/gpu.h"
#include "device/norm_layout.h"
#include "host/lanes.h"
#include "norm.h"

namespace apex {
namespace {
constexpr int64_t held = 2048;  // elements of a row that are converted once; those of longer rows are in each pass

template <class Math> APEX_INLINE void fill(Math* x, int64_t n, Math value) {
  for (int64_t j = 0; j < n; ++j) x[j] = value;
}
// Of a row, a tile at a time: few roundings come one after the other. All of the row shares what the total loses.
template <class Math> struct RowSum {
  Lanes<Added, double> tiles{0.0};
  // value(j) for j in [0, n).
  template <class Value> APEX_INLINE void add(int64_t n, const Value& value) {
    Lanes<Added, Math> of(Math(0));
    of.take(n, value);
    tiles.take(of);
  }
  APEX_INLINE void add(const Lanes<Added, Math>& of) { tiles.take(of); }
  APEX_INLINE double total() const { return tiles.whole(); }
};

// A row of a tensor, or a weight, as arithmetic sees it.
template <class Math> class Row {
 public:
  APEX_INLINE explicit Row(const TileConversions<Math>& convert) : convert_(convert) {}
  // Elements [base, base + length) of a tensor; null: there is none.
  APEX_INLINE void begin(const void* tensor, int32_t type, int64_t base, int64_t length) {
    tensor_ = tensor, type_ = type, base_ = base, whole_ = nullptr;
    if (tensor && (length <= held || type == DtypeOf<Math>::value))
      whole_ = load_tile(convert_, tensor, type, base, length, values_);
  }
  // Where a row is made, and is; null: it is too long.
  APEX_INLINE Math* begin_made(int64_t length) {
    tensor_ = values_, whole_ = length <= held ? values_ : nullptr;
    return length <= held ? values_ : nullptr;
  }
  // Elements [i, i + n) of these, n at most `tile`; null where there are none.
  APEX_INLINE const Math* tile_at(int64_t i, int64_t n) {
    if (whole_ || !tensor_) return whole_ ? whole_ + i : nullptr;
    return load_tile(convert_, tensor_, type_, base_ + i, n, values_);
  }

 private:
  const TileConversions<Math>& convert_;
  const void* tensor_ = nullptr;
  int32_t type_ = 0;
  int64_t base_ = 0;
  const Math* whole_ = nullptr;
  alignas(64) Math values_[held];
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
  const bool streamed = !fp8 && is_streamed(a.rows * a.hidden, a.output_type);
  const bool fetched = is_fetched(a.rows * a.hidden, a.input_type);

  // A tile of the output in FP8; returns the largest magnitude, as record_amax_cpu takes it.
  APEX_INLINE int32_t store_codes(const Math* y, int64_t at, int64_t n, int32_t largest) const {
    if constexpr (std::is_same_v<Math, float>) {
      encode_tile(gpu::Fp8(fp8->format), y, *fp8->scale, n, a.output + at);
      return largest_of_tile(largest, y, n);
    }
    return largest;
  }

  // What is normalised: the input, or input + residual, rounded as it is stored.
  APEX_INLINE void begin_row(const TileConversions<Math>& convert, int64_t base, Row<Math>& x) const {
    if (!a.residual) return x.begin(a.input, a.input_type, base, a.hidden);
    alignas(64) Math first[tile], second[tile], third[tile];
    // Streamed where the row is at hand besides.
    Math* const kept = streamed && a.input_type == DtypeOf<Math>::value ? x.begin_made(a.hidden) : nullptr;
    for (int64_t i = 0; i < a.hidden; i += tile) {
      const int64_t n = std::min<int64_t>(tile, a.hidden - i);
      const Math* x = load_tile(convert, a.input, a.input_type, base + i, n, first);
      const Math* y = load_tile(convert, a.residual, a.input_type, base + i, n, second);
      Math* const sum = kept ? kept + i : made_tile(a.sum, a.input_type, base + i, third);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) sum[j] = x[j] + y[j];
      store_tile(convert, a.sum, a.input_type, base + i, n, static_cast<const Math*>(sum), kept != nullptr);
    }
    if (!kept) x.begin(a.sum, a.input_type, base, a.hidden);
  }
  APEX_INLINE void fetch_row(int64_t i, int64_t n) const {
    fetch_tile(a.input, a.input_type, i, n);
    if (a.residual) fetch_tile(a.residual, a.input_type, i, n);
  }
  // The sum of squares of differences from `near`.
  APEX_INLINE double squares_around(Row<Math>& x, Math near) const {
    RowSum<Math> squares;
    for (int64_t i = 0; i < a.hidden; i += tile) {
      const int64_t n = std::min<int64_t>(tile, a.hidden - i);
      const Math* of = x.tile_at(i, n);
      squares.add(n, [&](int64_t j) APEX_INLINE_LAMBDA { return (of[j] - near) * (of[j] - near); });
    }
    return squares.total();
  }
  // Sum and sum of squares of differences from `pivot`, in one pass.
  APEX_INLINE void sums_around(Row<Math>& x, Math pivot, double* sum, double* squares) const {
    Lanes<Added, double> sums(0.0), sums_of_squares(0.0);
    for (int64_t i = 0; i < a.hidden; i += tile) {
      const int64_t n = std::min<int64_t>(tile, a.hidden - i);
      const Math* of = x.tile_at(i, n);
      Lanes<Added, Math> first(Math(0)), second(Math(0));
      each_lane(n, [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA {
        const Math apart = of[j] - pivot;
        first.of[l] += apart;
        second.of[l] += apart * apart;
      });
      sums.take(first);
      sums_of_squares.take(second);
    }
    *sum = sums.whole();
    *squares = sums_of_squares.whole();
  }
  // About the row's mean; an element where all are equal, however large.
  APEX_INLINE Math pivot_of(Row<Math>& x) const {
    constexpr int64_t some = 16;
    const int64_t n = a.hidden < some ? 1 : some;
    const Math* of = x.tile_at(0, n);
    Math sum = Math(0);
    for (int64_t j = 0; j < n; ++j) sum += (of[j] - of[0]) / Math(some);
    return of[0] + sum;
  }
  // Leaves mean and rstd of the row.
  APEX_INLINE Normalize<Math> measure(int64_t row, Row<Math>& x) const {
    const double count = double(a.hidden);
    double mean = 0, squares;
    if (centered) {
      // Differences from a pivot: sums of a large mean would round. Unless it is near the mean, beside the deviation,
      // the squares are added up again.
      const Math pivot = pivot_of(x);
      double sum;
      sums_around(x, pivot, &sum, &squares);
      mean = double(pivot) + sum / count;
      const double of_pivot = sum * sum / count;
      // Those around a mean that is rounded have the rounding's square in each.
      const double rounded = mean - double(Math(mean));
      squares =
          of_pivot <= squares / 4 ? squares - of_pivot : squares_around(x, Math(mean)) - count * rounded * rounded;
    } else {
      squares = squares_around(x, Math(0));
    }
    const Math near = Math(mean);
    const double rstd = 1 / gpu::sqrt(squares / count + a.eps);
    if (centered) reinterpret_cast<Math*>(a.mean)[row] = near;
    reinterpret_cast<Math*>(a.rstd)[row] = Math(rstd);
    return Normalize<Math>(mean, rstd);
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    Row<Math> x(convert), weight(convert), bias(convert);
    alignas(64) Math made[tile], moved[tile];
    weight.begin(a.weight, a.weight_type, 0, a.hidden);
    bias.begin(centered ? a.bias : nullptr, a.weight_type, 0, a.hidden);
    int32_t largest = 0;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t base = row * a.hidden;
      begin_row(convert, base, x);
      const Normalize<Math> normalize = measure(row, x);
      for (int64_t i = 0; i < a.hidden; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.hidden - i);
        const Math *of = x.tile_at(i, n), *w = weight.tile_at(i, n), *b = bias.tile_at(i, n);
        if (fetched) fetch_row(base + a.hidden + i, n);
        if (fp8 && fp8->zero_centered_gamma && w) {
          for (int64_t j = 0; j < n; ++j) moved[j] = w[j] + Math(1);
          w = moved;
        }
        Math* const y = fp8 ? made : made_tile(a.output, a.output_type, base + i, made, streamed);
        write(normalize, n, of, w, b, y);
        if (fp8) largest = store_codes(y, base + i, n, largest);
        else store_tile(convert, a.output, a.output_type, base + i, n, static_cast<const Math*>(y), streamed);
      }
    }
    if (fp8) record_amax_cpu(fp8->amax, largest);
  }
  APEX_INLINE void write(const Normalize<Math>& normalize, int64_t n, const Math* x, const Math* w, const Math* b,
                         Math* y) const {
    if (w && b) {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) y[j] = gpu::fma(normalize(x[j]), w[j], b[j]);
    } else if (w) {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) y[j] = normalize(x[j]) * w[j];
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) y[j] = normalize(x[j]) + (b ? b[j] : Math(0));
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// Parts of rows, one after the other: each adds its rows' weight gradients up in its own partial sums.
template <bool centered, class Math> struct Backward {
  const gpu::NormBackward& a;
  const bool streamed = is_streamed(a.rows * a.hidden, a.input_type);
  const bool fetched = is_fetched(a.rows * a.hidden, a.input_type);

  struct Rows {
    Row<Math> saved, grad, weight, bias, more;
    alignas(64) Math rebuilt[tile], ones[tile];
    APEX_INLINE explicit Rows(const TileConversions<Math>& convert)
        : saved(convert), grad(convert), weight(convert), bias(convert), more(convert) {
      fill<Math>(ones, tile, Math(1));
    }
  };
  // Of a tile: x and what makes x^ of it, the gradient, and the weight. Both passes of a row make x^ and g: were they
  // kept between, a row would not stay in the first-level cache.
  struct Read {
    const Math *x, *dy, *w;
    Normalize<Math> normalize;
    APEX_INLINE Math normalized(int64_t j) const { return normalize(x[j]); }
    APEX_INLINE Math along(int64_t j) const { return dy[j] * w[j]; }
  };
  // What a memory-efficient norm normalised, out of its output.
  APEX_INLINE void from_output(const Math* y, const Math* w, const Math* b, int64_t n, Math* normalized) const {
    const Math smallest = Math(a.eps);
    for (int64_t j = 0; j < n; ++j) {
      const Math weight = w ? w[j] : Math(1), magnitude = std::max(weight < Math(0) ? -weight : weight, smallest);
      normalized[j] = (y[j] - (b ? b[j] : Math(0))) / (weight < Math(0) ? -magnitude : magnitude);
    }
  }
  APEX_INLINE void fetch_row(int64_t i, int64_t n) const {
    fetch_tile(a.saved, a.from_output ? a.output_type : a.input_type, i, n);
    fetch_tile(a.grad_output, a.output_type, i, n);
  }
  // Elements [i, i + n) of a row.
  APEX_INLINE Read read(Rows& t, int64_t i, int64_t n, const Normalize<Math>& normalize) const {
    const Math *x = t.saved.tile_at(i, n), *dy = t.grad.tile_at(i, n), *w = t.weight.tile_at(i, n);
    if (!a.from_output) return {x, dy, w ? w : t.ones, normalize};
    from_output(x, w, t.bias.tile_at(i, n), n, t.rebuilt);
    return {t.rebuilt, dy, w ? w : t.ones, Normalize<Math>(0, 1)};
  }
  APEX_INLINE void run_row(const TileConversions<Math>& convert, Rows& t, int64_t row, Math* of_weight,
                           Math* of_bias) const {
    const int64_t base = row * a.hidden;
    const Math mean = centered && a.mean ? reinterpret_cast<const Math*>(a.mean)[row] : Math(0);
    const Math rstd = reinterpret_cast<const Math*>(a.rstd)[row];
    const Normalize<Math> normalize(mean, rstd);
    t.saved.begin(a.saved, a.from_output ? a.output_type : a.input_type, base, a.hidden);
    t.grad.begin(a.grad_output, a.output_type, base, a.hidden);
    t.more.begin(a.grad_sum, a.input_type, base, a.hidden);
    RowSum<Math> along_x, along_one;
    for (int64_t i = 0; i < a.hidden; i += tile) {
      const int64_t n = std::min<int64_t>(tile, a.hidden - i);
      const Read of = read(t, i, n, normalize);
      Lanes<Added, Math> one(Math(0)), x(Math(0));
      each_lane(n, [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA {
        const Math g = of.along(j);
        if (centered) one.of[l] += g;
        x.of[l] += g * of.normalized(j);
      });
      if (centered) along_one.add(one);
      along_x.add(x);
    }
    const double scale = double(rstd) / double(a.hidden);
    const Math of_x = Math(along_x.total() * scale), of_one = Math(along_one.total() * scale);
    alignas(64) Math made[tile];
    for (int64_t i = 0; i < a.hidden; i += tile) {
      const int64_t n = std::min<int64_t>(tile, a.hidden - i);
      const Read of = read(t, i, n, normalize);
      if (fetched) fetch_row(base + a.hidden + i, n);
      Math* const dx = made_tile(a.grad_input, a.input_type, base + i, made, streamed);
      if (of_bias) {
        Math *weights = of_weight + i, *biases = of_bias + i;
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) {
          const Math normalized = of.normalized(j), dy = of.dy[j];
          weights[j] = gpu::fma(dy, normalized, weights[j]);
          biases[j] += dy;
          dx[j] = gpu::fma(of.along(j), rstd, -gpu::fma(normalized, of_x, of_one));
        }
      } else {
        if (of_weight) {
#pragma GCC ivdep
          for (int64_t j = 0; j < n; ++j) of_weight[i + j] = gpu::fma(of.dy[j], of.normalized(j), of_weight[i + j]);
        }
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) dx[j] = gpu::fma(of.along(j), rstd, -gpu::fma(of.normalized(j), of_x, of_one));
      }
      if (const Math* more = t.more.tile_at(i, n)) {
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) dx[j] += more[j];
      }
      store_tile(convert, a.grad_input, a.input_type, base + i, n, static_cast<const Math*>(dx), streamed);
    }
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    Rows t(convert);
    t.weight.begin(a.weight, a.weight_type, 0, a.hidden);
    t.bias.begin(centered ? a.bias : nullptr, a.weight_type, 0, a.hidden);
    for (int64_t part = begin; part < end; ++part) {
      Math* of_weight =
          a.grad_weight ? reinterpret_cast<Math*>(a.partials) + part * gpu::norm_partials_pitch(a.hidden) : nullptr;
      Math* of_bias = centered && of_weight ? of_weight + a.parts * gpu::norm_partials_pitch(a.hidden) : nullptr;
      if (of_weight) fill(of_weight, a.hidden, Math(0));
      if (of_bias) fill(of_bias, a.hidden, Math(0));
      for (int64_t row = a.rows * part / a.parts; row < a.rows * (part + 1) / a.parts; ++row)
        run_row(convert, t, row, of_weight, of_bias);
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
