// Launching the kernel of kept_magnitudes.
#include "kept_magnitudes.h"

#include "device_limits.h"
#include "status.h"

extern "C" int32_t apex_kept_magnitudes(const apex_place* place, const gpu::KeptMagnitudes* arguments) {
  static apex_kernel kernel = {"kept_magnitudes", "kept_magnitudes_f32", 0};
  gpu::KeptMagnitudes a = *arguments;
  if (a.count < 0 || a.rows < 0 || a.groups_count < 0)
    return apex::fail(APEX_ERROR_VALUE, "%s: sizes are not negative", kernel.unit);
  for (int64_t i = 0; place->platform == APEX_CPU && i < a.groups_count * gpu::kept_columns; ++i)
    if (a.groups[i] < 0 || a.groups[i] >= a.count)
      return apex::fail(APEX_ERROR_INDEX, "%s: groups[%lld] has the index %d, outside [0, %lld)", kernel.unit,
                        (long long)(i / gpu::kept_columns), a.groups[i], (long long)a.count);
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, kernel.unit, &variant)) return status;
  if (a.groups_count == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    apex::kept_magnitudes_cpu(a);
    return APEX_OK;
  }
  apex::DeviceLimits limits;
  if (const int32_t status = apex::device_limits(*place, &limits)) return status;
  void* parameters[] = {&a};
  const int64_t groups_of_block = gpu::kept_threads / limits.warp_size;
  const uint32_t blocks = uint32_t(apex::ceil_divide(a.groups_count, groups_of_block));
  return apex_launch(place, &kernel, {blocks, 1, 1}, {gpu::kept_threads, 1, 1}, 0, parameters);
}
