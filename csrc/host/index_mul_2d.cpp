#include "index_mul_2d.h"

#include <algorithm>

#include "device_limits.h"
#include "status.h"
#include "values.h"

namespace apex {
namespace {
constexpr const char* unit = "index_mul_2d";
// By apex_dtype.
apex_kernel gather_kernels[] = {{unit, "index_mul_2d_gather_f32", 0},
                                {unit, "index_mul_2d_gather_f16", 0},
                                {unit, "index_mul_2d_gather_bf16", 0},
                                {unit, "index_mul_2d_gather_f64", 0}};
apex_kernel scatter_kernels[] = {{unit, "index_mul_2d_scatter_f32", 0},
                                 {unit, "index_mul_2d_scatter_f16", 0},
                                 {unit, "index_mul_2d_scatter_bf16", 0},
                                 {unit, "index_mul_2d_scatter_f64", 0}};

int32_t run(const apex_place* place, apex_kernel* kernels, int64_t rows, gpu::IndexMul2d a,
            void (*cpu)(const gpu::IndexMul2d&)) {
  if (a.type < APEX_F32 || a.type > APEX_F64)
    return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", unit);
  int32_t variant;
  if (const int32_t status = choose_variant(*place, unit, &variant)) return status;
  if (rows == 0 || a.features == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const int64_t width = a.type == APEX_F64 ? 2 : a.type == APEX_F32 ? 4 : 8;
  const auto addresses =
      reinterpret_cast<uintptr_t>(a.a) | reinterpret_cast<uintptr_t>(a.b) | reinterpret_cast<uintptr_t>(a.out);
  a.in_vectors = a.features % width == 0 && addresses % 16 == 0;
  const int64_t packets = rows * (a.in_vectors ? a.features / width : a.features), threads = gpu::index_mul_2d_threads;
  const int64_t blocks = std::min<int64_t>((packets + threads - 1) / threads, int64_t(limits.multiprocessors) * 32);
  void* parameters[] = {&a};
  return apex_launch(place, &kernels[a.type], {uint32_t(blocks), 1, 1}, {uint32_t(threads), 1, 1}, 0, parameters);
}
}  // namespace
}  // namespace apex

int32_t apex_index_mul_2d_forward(const apex_place* place, const gpu::IndexMul2d* a) {
  for (int64_t i = 0; place->platform == APEX_CPU && i < a->rows; ++i) {
    const int64_t index = apex::integer_at(a->index, i, a->wide_index);
    if (index < 0 || index >= a->entries)
      return apex::fail(APEX_ERROR_INDEX, "%s: idx1[%lld] is %lld, outside [0, %lld)", apex::unit, (long long)i,
                        (long long)index, (long long)a->entries);
  }
  return apex::run(place, apex::gather_kernels, a->rows, *a, &apex::index_mul_2d_gather_cpu);
}
int32_t apex_index_mul_2d_scatter(const apex_place* place, const gpu::IndexMul2d* a) {
  return apex::run(place, apex::scatter_kernels, a->entries, *a, &apex::index_mul_2d_scatter_cpu);
}
