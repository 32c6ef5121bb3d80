// The CPU variant of casts to FP8, at each x86-64 level: 128 rows a task, in tiles that stay in the first-level cache.
#include "fp8_cpu.h"
#include "fp8_quantize.h"

namespace apex {
namespace {
struct Casts {
  const gpu::Fp8Quantize& a;
  const gpu::Fp8 form;
  const float scale;

  // y of elements [i, i + n) of a row: in made[0], and made[1] of a gated gradient.
  APEX_INLINE void make(const TileConversions<float>& convert, int64_t row, int64_t i, int64_t n,
                        float (&made)[2][tile]) const {
    const gpu::Activation<float, true> f(a);
    const int64_t halves = a.gated ? 2 : 1;
    alignas(64) float first[tile], second[tile], gradient[tile];
    if (a.source == gpu::fp8_of_input) {
      const float* x = load_tile(convert, a.input, a.type, row * a.columns + i, n, first);
      std::copy(x, x + n, made[0]);
      return;
    }
    const uint8_t* before = a.source == gpu::fp8_of_gradient ? a.before : a.input;
    const int64_t at = row * halves * a.columns + i;
    const float* x = load_tile(convert, before, a.type, at, n, first);
    const float* gate = a.gated ? load_tile(convert, before, a.type, at + a.columns, n, second) : x;
    if (a.source == gpu::fp8_of_activation) {
      if (a.gated)
        for (int64_t j = 0; j < n; ++j) made[0][j] = gpu::activated<true>(f, x[j], gate[j]);
      else
        for (int64_t j = 0; j < n; ++j) made[0][j] = gpu::activated<false>(f, x[j], gate[j]);
      return;
    }
    const float* g = load_tile(convert, a.input, a.type, row * a.columns + i, n, gradient);
    if (a.gated)
      for (int64_t j = 0; j < n; ++j) made[0][j] = gpu::activation_gradient<true>(f, g[j], x[j], gate[j], made[1][j]);
    else
      for (int64_t j = 0; j < n; ++j) made[0][j] = gpu::activation_gradient<false>(f, g[j], x[j], gate[j], made[1][j]);
  }

  // Blocks [begin, end) of rows.
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, float());
    const int64_t parts = a.gated && a.source == gpu::fp8_of_gradient ? 2 : 1, width = a.columns * parts;
    alignas(64) float made[2][tile], sums[2][tile];
    alignas(64) uint8_t codes[2][fp8_rows][tile];
    int32_t largest = 0;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row0 = block * fp8_rows, rows = std::min<int64_t>(fp8_rows, a.rows - row0);
      for (int64_t i = 0; i < a.columns; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.columns - i);
        std::memset(sums, 0, sizeof sums);
        for (int64_t r = 0; r < rows; ++r) {
          make(convert, row0 + r, i, n, made);
          for (int64_t h = 0; h < parts; ++h) {
            largest = largest_of_tile(largest, made[h], n);
            for (int64_t j = 0; j < n; ++j) sums[h][j] += made[h][j];
            encode_tile(form, made[h], scale, n, codes[h][r]);
            if (a.by_row) copy_bytes(a.by_row + (row0 + r) * width + h * a.columns + i, codes[h][r], n);
          }
        }
        for (int64_t h = 0; h < parts; ++h) {
          const int64_t column = h * a.columns + i;
          if (a.by_column) transpose_codes(codes[h][0], tile, rows, n, a.by_column + column * a.rows + row0, a.rows);
          if (a.partials)
            copy_bytes(reinterpret_cast<float*>(a.partials) + block * width + column, sums[h],
                       n * int64_t(sizeof(float)));
        }
      }
    }
    record_amax_cpu(a.amax, largest);
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};
}  // namespace

void fp8_quantize_cpu(const gpu::Fp8Quantize& a) {
  const int64_t blocks = (a.rows + fp8_rows - 1) / fp8_rows;
  run_at_level(Casts{a, gpu::Fp8(a.format), *a.scale}, 0, blocks,
               std::max<int64_t>(1, elements_per_task / (fp8_rows * a.columns)));
  const int64_t width = a.columns * (a.gated && a.source == gpu::fp8_of_gradient ? 2 : 1);
  if (a.grad_bias) sum_parts_cpu(reinterpret_cast<const float*>(a.partials), blocks, width, a.grad_bias, a.type);
}
}  // namespace apex
