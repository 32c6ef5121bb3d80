// The kernels of a cast to FP8 (fp8_quantize.h says what they compute): one read of the input, one write of each layout
// that is asked for. Of two bytes an element and both layouts that is 4 bytes an element.
#include "column_sums.h"
#include "fp8_quantize_tile.h"

#define KERNEL(name, ...)                                                                                \
  extern "C" GPU_KERNEL(gpu::fp8_tile_threads, 2) void fp8_quantize_##name(gpu::Fp8Quantize arguments) { \
    gpu::await_previous_kernel();                                                                        \
    gpu::fp8_quantize<__VA_ARGS__>(arguments, gpu::block_x());                                           \
  }                                                                                                      \
  GPU_REGISTER(fp8_quantize_##name)
#define KERNELS(name, width, type)                                           \
  KERNEL(input_##name, width, type, gpu::fp8_of_input, false)                \
  KERNEL(activation_##name, width, type, gpu::fp8_of_activation, false)      \
  KERNEL(activation_gated_##name, width, type, gpu::fp8_of_activation, true) \
  KERNEL(gradient_##name, width, type, gpu::fp8_of_gradient, false)          \
  KERNEL(gradient_gated_##name, width, type, gpu::fp8_of_gradient, true)
KERNELS(bf16x8, 8, gpu::type_bf16)
KERNELS(f16x8, 8, gpu::type_f16)
KERNELS(f32x4, 4, gpu::type_f32)
KERNELS(any1, 1, gpu::any_type)

extern "C" GPU_KERNEL(gpu::column_sums_threads) void fp8_quantize_sums(gpu::Fp8Quantize arguments) {
  gpu::await_previous_kernel();
  const bool doubled = arguments.gated && arguments.source == gpu::fp8_of_gradient;
  const gpu::i64 parts = (arguments.rows + gpu::fp8_tile_rows - 1) / gpu::fp8_tile_rows;
  gpu::column_sums(reinterpret_cast<const float*>(arguments.partials), parts, arguments.columns * (doubled ? 2 : 1),
                   arguments.grad_bias, arguments.type);
}
GPU_REGISTER(fp8_quantize_sums)
