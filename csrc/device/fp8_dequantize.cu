// The kernel of FP8's way back (fp8_dequantize.h): 16 codes a thread; of two bytes an element that is 3 bytes.
#include "fp8_dequantize.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
GPU_FN void dequantize(const Fp8Dequantize& a) {
  constexpr int width = fp8_dequantize_width;
  const Fp8 form(a.format);
  const float scale = *a.scale_inv;
  const i64 first = ((i64)block_x() * fp8_dequantize_threads + thread_x()) * width;
  if (a.vectors && first + width <= a.count) {
    const Words codes = *reinterpret_cast<const Words*>(a.input + first);
    GPU_UNROLL_FOR (int half = 0; half < 2; ++half) {
      float x[8];
      GPU_UNROLL_FOR (int i = 0; i < 8; ++i)
        x[i] = form.decode(codes.v[half * 2 + i / 4] >> 8 * (i % 4) & 0xffu) * scale;
      store_values(a.output, a.type, first + half * 8, x);
    }
    return;
  }
  for (i64 i = first; i < a.count && i < first + width; ++i) {
    const float x[1] = {form.decode(a.input[i]) * scale};
    store_values(a.output, a.type, i, x);
  }
}
#endif
}  // namespace
}  // namespace gpu

extern "C" GPU_KERNEL(gpu::fp8_dequantize_threads) void fp8_dequantize_any(gpu::Fp8Dequantize arguments) {
  gpu::await_previous_kernel();
  gpu::dequantize(arguments);
}
GPU_REGISTER(fp8_dequantize_any)
