// The CPU variant of FP8's way back, at each x86-64 level.
#include "fp8_dequantize.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {
struct Numbers {
  const gpu::Fp8Dequantize& a;
  const gpu::Fp8 form;
  const float scale;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, float());
    alignas(64) float x[tile];
    for (int64_t i = begin; i < end; i += tile) {
      const int64_t n = std::min<int64_t>(tile, end - i);
      for (int64_t j = 0; j < n; ++j) x[j] = form.decode(a.input[i + j]) * scale;
      store_tile(convert, a.output, a.type, i, n, static_cast<const float*>(x));
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};
}  // namespace

void fp8_dequantize_cpu(const gpu::Fp8Dequantize& a) {
  run_at_level(Numbers{a, gpu::Fp8(a.format), *a.scale_inv}, 0, a.count, elements_per_task);
}
}  // namespace apex
