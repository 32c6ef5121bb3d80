// The CPU variant of FP8's transpose, at each x86-64 level: 128 rows a task.
#include "fp8_cpu.h"
#include "fp8_transpose.h"

namespace apex {
namespace {
struct Transposes {
  const gpu::Fp8Transpose& a;
  const gpu::Fp8 form;
  const float scale;

  APEX_INLINE void run_chunks(int, int64_t begin, int64_t end) const {
    alignas(64) float sums[tile];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row0 = block * fp8_rows, rows = std::min<int64_t>(fp8_rows, a.rows - row0);
      for (int64_t i = 0; i < a.columns; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.columns - i);
        const uint8_t* from = a.input + row0 * a.columns + i;
        transpose_codes(from, a.columns, rows, n, a.output + i * a.rows + row0, a.rows);
        if (!a.partials) continue;
        std::fill(sums, sums + n, 0.0f);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t j = 0; j < n; ++j) sums[j] += form.decode(from[r * a.columns + j]) * scale;
        copy_bytes(reinterpret_cast<float*>(a.partials) + block * a.columns + i, sums, n * int64_t(sizeof(float)));
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};
}  // namespace

void fp8_transpose_cpu(const gpu::Fp8Transpose& a) {
  const int64_t blocks = (a.rows + fp8_rows - 1) / fp8_rows;
  run_at_level(Transposes{a, gpu::Fp8(a.format), a.partials ? *a.scale_inv : 1.0f}, 0, blocks,
               std::max<int64_t>(1, elements_per_task / (fp8_rows * a.columns)));
  if (a.grad_bias) sum_parts_cpu(reinterpret_cast<const float*>(a.partials), blocks, a.columns, a.grad_bias, a.type);
}
}  // namespace apex
