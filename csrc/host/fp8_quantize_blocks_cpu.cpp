// The CPU variant of block scaling's casts, at each x86-64 level: a block of 128x128 at once.
#include "fp8_cpu.h"
#include "fp8_quantize_blocks.h"

namespace apex {
namespace {
constexpr int64_t side = gpu::fp8_block;
static_assert(side <= tile, "a row of a block is one tile");

struct Blocks {
  const gpu::Fp8QuantizeBlocks& a;
  const gpu::Fp8 form;

  APEX_INLINE float scale_of(int32_t largest) const {
    return gpu::current_scale(gpu::bit_cast<float>(largest), form.maximum(), a.epsilon, a.power_of_two);
  }
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, float());
    alignas(64) float buffer[side], x[side][side];
    alignas(64) uint8_t codes[side][side];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row0 = block / a.column_blocks * side, column0 = block % a.column_blocks * side;
      const int64_t rows = std::min<int64_t>(side, a.rows - row0), n = std::min<int64_t>(side, a.columns - column0);
      int32_t largest = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const float* from = load_tile(convert, a.input, a.type, (row0 + r) * a.columns + column0, n, buffer);
        copy_bytes(x[r], from, n * int64_t(sizeof(float)));
        const int32_t of_row = largest_of_tile(0, x[r], n);
        largest = std::max(largest, of_row);
        if (a.square || !a.by_row) continue;
        const float scale = scale_of(of_row);
        a.scale_inv[(block % a.column_blocks) * a.rows + row0 + r] = 1.0f / scale;
        encode_tile(form, x[r], scale, n, a.by_row + (row0 + r) * a.columns + column0);
      }
      if (a.square) run_square(block, row0, column0, rows, n, scale_of(largest), x, codes);
      else if (a.by_column) scale_columns(block, column0, rows, n, x, codes);
      if (a.by_column) transpose_codes(codes[0], side, rows, n, a.by_column + column0 * a.rows + row0, a.rows);
    }
  }
  APEX_INLINE void run_square(int64_t block, int64_t row0, int64_t column0, int64_t rows, int64_t n, float scale,
                              const float (&x)[side][side], uint8_t (&codes)[side][side]) const {
    a.scale_inv[block] = 1.0f / scale;
    for (int64_t r = 0; r < rows; ++r) {
      encode_tile(form, x[r], scale, n, codes[r]);
      if (a.by_row) copy_bytes(a.by_row + (row0 + r) * a.columns + column0, codes[r], n);
    }
  }
  // A scale for each column of the block.
  APEX_INLINE void scale_columns(int64_t block, int64_t column0, int64_t rows, int64_t n, const float (&x)[side][side],
                                 uint8_t (&codes)[side][side]) const {
    float scales[side], largest[side] = {};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < n; ++j) largest[j] = gpu::larger_magnitude(largest[j], x[r][j]);
    for (int64_t j = 0; j < n; ++j) {
      scales[j] = scale_of(gpu::bit_cast<int32_t>(largest[j]));
      a.scale_inv_turned[block / a.column_blocks * a.columns + column0 + j] = 1.0f / scales[j];
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < n; ++j) codes[r][j] = uint8_t(form.encode(x[r][j] * scales[j]));
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};
}  // namespace

void fp8_quantize_blocks_cpu(const gpu::Fp8QuantizeBlocks& a) {
  const int64_t blocks = (a.rows + side - 1) / side * int64_t(a.column_blocks);
  run_at_level(Blocks{a, gpu::Fp8(a.format)}, 0, blocks, std::max<int64_t>(1, elements_per_task / (side * side)));
}
}  // namespace apex
