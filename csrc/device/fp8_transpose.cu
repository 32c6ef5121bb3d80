// The kernels of FP8's transpose (fp8_transpose.h says what they compute): one read and one write, 2 bytes an element.
#include "column_sums.h"
#include "fp8_transpose.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
template <int width> GPU_FN void transpose(const Fp8Transpose& a) {
  GPU_SHARED(Words, shared, Fp8Tile<width>::shared_words);
  const i64 block_row = block_x() / a.column_blocks, row0 = block_row * fp8_tile_rows;
  const i64 column0 = (i64)(block_x() % a.column_blocks) * fp8_lanes * width;
  const i64 row = row0 + thread_x() / fp8_lanes * fp8_tall, column = column0 + thread_x() % fp8_lanes * width;
  Fp8Tile<width> tile;
  GPU_UNROLL_FOR (int k = 0; k < fp8_tall; ++k) {
    if (row + k < a.rows && column < a.columns) tile.load_row(k, a.input + (row + k) * a.columns + column);
    else tile.clear(k);
  }
  tile.store_columns(shared, a.output, row0, a.rows, column0, a.columns, a.wide_columns);
  if (!a.partials) return;
  const Fp8 form(a.format);
  const float scale = *a.scale_inv;
  float sums[width];
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
    sums[i] = 0.0f;
    GPU_UNROLL_FOR (int k = 0; k < fp8_tall; ++k)  // a code 0 is 0
      sums[i] += form.decode(tile.code[k][i / 4] >> 8 * (i % 4) & 0xffu) * scale;
  }
  store_column_sums(reinterpret_cast<float*>(shared), sums,
                    reinterpret_cast<float*>(a.partials) + block_row * a.columns, column0, a.columns);
}
#endif
}  // namespace
}  // namespace gpu

#define KERNEL(name, threads, ...)                                                        \
  extern "C" GPU_KERNEL(threads) void fp8_transpose_##name(gpu::Fp8Transpose arguments) { \
    gpu::await_previous_kernel();                                                         \
    __VA_ARGS__;                                                                          \
  }                                                                                       \
  GPU_REGISTER(fp8_transpose_##name)
KERNEL(x16, gpu::fp8_tile_threads, gpu::transpose<16>(arguments))
KERNEL(x1, gpu::fp8_tile_threads, gpu::transpose<1>(arguments))
KERNEL(sums, gpu::column_sums_threads,
       gpu::column_sums(reinterpret_cast<const float*>(arguments.partials),
                        (arguments.rows + gpu::fp8_tile_rows - 1) / gpu::fp8_tile_rows, arguments.columns,
                        arguments.grad_bias, arguments.type))
