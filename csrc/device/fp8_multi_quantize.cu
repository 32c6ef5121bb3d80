// The kernels of casts of many matrices to FP8 (fp8_multi_quantize.h): as fp8_quantize's, a block looks up whose it is.
#include "fp8_multi_quantize.h"
#include "fp8_quantize_tile.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
// The matrix that a block belongs to: the last one that begins at it or before.
GPU_FN i32 owner_of(const Fp8MultiQuantize& a, u32 block) {
  i32 low = 0, high = a.count - 1;
  while (low < high) {
    const i32 middle = (low + high + 1) / 2;
    if (a.first_block[middle] <= block) low = middle;
    else high = middle - 1;
  }
  return low;
}

template <int width, i32 fixed> GPU_FN void multi_quantize(const Fp8MultiQuantize& a) {
  const i32 own = owner_of(a, block_x());
  Fp8Quantize one{};
  one.input = global_pointer<const u8>(a.input[own]);
  one.by_row = a.by_row[own] ? global_pointer<u8>(a.by_row[own]) : nullptr;
  one.by_column = a.by_column[own] ? global_pointer<u8>(a.by_column[own]) : nullptr;
  one.scale = a.scale + own;
  one.amax = a.amax ? a.amax + own : nullptr;
  one.rows = a.rows[own], one.columns = a.columns[own];
  one.type = a.type, one.format = a.format;
  one.wide_columns = one.rows % 16 == 0 && a.by_column[own] % 16 == 0;
  one.column_blocks = (u32)((one.columns + fp8_lanes * width - 1) / (fp8_lanes * width));
  fp8_quantize<width, fixed, fp8_of_input, false>(one, block_x() - a.first_block[own]);
}
#endif
}  // namespace
}  // namespace gpu

#define KERNEL(name, ...)                                                                                           \
  extern "C" GPU_KERNEL(gpu::fp8_tile_threads, 2) void fp8_multi_quantize_##name(gpu::Fp8MultiQuantize arguments) { \
    gpu::await_previous_kernel();                                                                                   \
    gpu::multi_quantize<__VA_ARGS__>(arguments);                                                                    \
  }                                                                                                                 \
  GPU_REGISTER(fp8_multi_quantize_##name)
KERNEL(bf16x8, 8, gpu::type_bf16)
KERNEL(f16x8, 8, gpu::type_f16)
KERNEL(f32x4, 4, gpu::type_f32)
KERNEL(any1, 1, gpu::any_type)
