// The kernels of block scaling's casts (fp8_quantize_blocks.h says what they compute): a tile of 128x128 a block, read
// once. Of two bytes an element and both layouts that is 4 bytes an element, and a float for each 128.
#include "fp8_quantize_blocks.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
constexpr int wide = 8;

// A thread's 8 rows of 8 columns.
struct BlocksTile {
  float x[fp8_tall][wide];
  i64 row, column;

  GPU_FN BlocksTile(const Fp8QuantizeBlocks& a, i64 row0, i64 column0)
      : row(row0 + thread_x() / fp8_lanes * fp8_tall), column(column0 + thread_x() % fp8_lanes * wide) {
    GPU_UNROLL_FOR (int k = 0; k < fp8_tall; ++k) {
      if (a.vectors && row + k < a.rows && column < a.columns) {
        load_values(x[k], a.input, a.type, (row + k) * a.columns + column);
        continue;
      }
      GPU_UNROLL_FOR (int i = 0; i < wide; ++i) {
        float one[1] = {0.0f};
        if (row + k < a.rows && column + i < a.columns)
          load_values(one, a.input, a.type, (row + k) * a.columns + column + i);
        x[k][i] = one[0];
      }
    }
  }
  GPU_FN float largest_of_row(int k) const {
    float largest = 0.0f;
    GPU_UNROLL_FOR (int i = 0; i < wide; ++i) largest = larger_magnitude(largest, x[k][i]);
    return largest;
  }
  GPU_FN float largest_of_column(int i) const {
    float largest = 0.0f;
    GPU_UNROLL_FOR (int k = 0; k < fp8_tall; ++k) largest = larger_magnitude(largest, x[k][i]);
    return largest;
  }
  GPU_FN void store_row(const Fp8QuantizeBlocks& a, const Fp8Tile<wide>& tile, int k) const {
    if (!a.by_row || row + k >= a.rows || column >= a.columns) return;
    u8* const to = a.by_row + (row + k) * a.columns + column;
    if (a.vectors) {
      tile.store_row(k, to);
      return;
    }
    GPU_UNROLL_FOR (int i = 0; i < wide; ++i)
      if (column + i < a.columns) to[i] = (u8)(tile.code[k][i / 4] >> 8 * (i % 4));
  }
};

GPU_FN void encode_row(Fp8Tile<wide>& tile, const Fp8& form, int k, const float (&x)[wide],
                       const float (&scale)[wide]) {
  float y[wide];
  GPU_UNROLL_FOR (int i = 0; i < wide; ++i) y[i] = x[i] * scale[i];
  tile.encode(form, k, y);
}

// One scale for all.
GPU_FN void quantize_square(const Fp8QuantizeBlocks& a, const BlocksTile& from, const Fp8& form, Fp8Tile<wide>& tile) {
  float largest = 0.0f;
  GPU_UNROLL_FOR (int k = 0; k < fp8_tall; ++k) largest = larger_magnitude(largest, from.largest_of_row(k));
  const float scale = current_scale(block_reduce<Maximum>(largest), form.maximum(), a.epsilon, a.power_of_two);
  if (thread_x() == 0) a.scale_inv[block_x()] = 1.0f / scale;
  float scales[wide];
  GPU_UNROLL_FOR (int i = 0; i < wide; ++i) scales[i] = scale;
  GPU_UNROLL_FOR (int k = 0; k < fp8_tall; ++k) {
    encode_row(tile, form, k, from.x[k], scales);
    from.store_row(a, tile, k);
  }
}

// One scale a row, of the threads side by side.
GPU_FN void quantize_rows(const Fp8QuantizeBlocks& a, const BlocksTile& from, const Fp8& form, Fp8Tile<wide>& tile) {
  GPU_UNROLL_FOR (int k = 0; k < fp8_tall; ++k) {
    float largest = from.largest_of_row(k), scales[wide];
    GPU_UNROLL_FOR (int mask = fp8_lanes / 2; mask; mask >>= 1)
      largest = Maximum::combine(largest, shuffle_xor_value(largest, mask));
    const float scale = current_scale(largest, form.maximum(), a.epsilon, a.power_of_two);
    GPU_UNROLL_FOR (int i = 0; i < wide; ++i) scales[i] = scale;
    if (thread_x() % fp8_lanes == 0 && from.row + k < a.rows)
      a.scale_inv[(i64)(block_x() % a.column_blocks) * a.rows + from.row + k] = 1.0f / scale;
    encode_row(tile, form, k, from.x[k], scales);
    from.store_row(a, tile, k);
  }
}

// One scale a column, of the threads on top of each other.
GPU_FN void quantize_columns(const Fp8QuantizeBlocks& a, const BlocksTile& from, const Fp8& form, float* shared,
                             Fp8Tile<wide>& tile) {
  constexpr u32 columns = fp8_lanes * wide;
  const u32 mine = thread_x() % fp8_lanes * wide, group = thread_x() / fp8_lanes;
  GPU_UNROLL_FOR (int i = 0; i < wide; ++i) shared[group * columns + mine + i] = from.largest_of_column(i);
  sync_threads();
  if (thread_x() < columns) {
    float largest = 0.0f;
    for (u32 k = 0; k < fp8_groups; ++k) largest = Maximum::combine(largest, shared[k * columns + thread_x()]);
    const float scale = current_scale(largest, form.maximum(), a.epsilon, a.power_of_two);
    shared[thread_x()] = scale;
    const i64 column = (i64)(block_x() % a.column_blocks) * columns + thread_x();
    if (column < a.columns) a.scale_inv_turned[block_x() / a.column_blocks * a.columns + column] = 1.0f / scale;
  }
  sync_threads();
  float scales[wide];
  GPU_UNROLL_FOR (int i = 0; i < wide; ++i) scales[i] = shared[mine + i];
  GPU_UNROLL_FOR (int k = 0; k < fp8_tall; ++k) encode_row(tile, form, k, from.x[k], scales);
  sync_threads();
}

GPU_FN void quantize_blocks(const Fp8QuantizeBlocks& a) {
  GPU_SHARED(Words, shared, Fp8Tile<wide>::shared_words);
  const i64 row0 = (i64)(block_x() / a.column_blocks) * fp8_block;
  const i64 column0 = (i64)(block_x() % a.column_blocks) * fp8_block;
  const BlocksTile from(a, row0, column0);
  const Fp8 form(a.format);
  Fp8Tile<wide> tile;
  if (a.square) quantize_square(a, from, form, tile);
  else if (a.by_row) quantize_rows(a, from, form, tile);
  if (!a.by_column) return;
  if (!a.square) quantize_columns(a, from, form, reinterpret_cast<float*>(shared), tile);
  tile.store_columns(shared, a.by_column, row0, a.rows, column0, a.columns, a.wide_columns);
}
#endif
}  // namespace
}  // namespace gpu

extern "C" GPU_KERNEL(gpu::fp8_tile_threads, 2) void fp8_quantize_blocks_any(gpu::Fp8QuantizeBlocks arguments) {
  gpu::await_previous_kernel();
  gpu::quantize_blocks(arguments);
}
GPU_REGISTER(fp8_quantize_blocks_any)
