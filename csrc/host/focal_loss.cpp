#include "focal_loss.h"

#include <algorithm>

#include "device_limits.h"
#include "dtypes.h"
#include "status.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "focal_loss";
// By apex_dtype.
apex_kernel forward_kernels[] = {{unit, "focal_loss_forward_f32", 0},
                                 {unit, "focal_loss_forward_f16", 0},
                                 {unit, "focal_loss_forward_bf16", 0},
                                 {unit, "focal_loss_forward_f64", 0}};
apex_kernel backward_kernels[] = {{unit, "focal_loss_backward_f32", 0},
                                  {unit, "focal_loss_backward_f16", 0},
                                  {unit, "focal_loss_backward_bf16", 0},
                                  {unit, "focal_loss_backward_f64", 0}};
apex_kernel finish_kernels[] = {{unit, "focal_loss_finish", 0}, {unit, "focal_loss_finish_f64", 0}};

// Blocks for all elements, but no more than the device holds at once: the others go around.
int64_t blocks_of(const gpu::FocalLoss& a, const DeviceLimits& limits) {
  const int64_t width = !a.in_vectors ? 1 : a.type == APEX_F64 ? 2 : a.type == APEX_F32 ? 4 : 8;
  const int64_t wanted = ceil_divide(a.rows * a.classes, width * int64_t(gpu::focal_loss_threads));
  return std::clamp<int64_t>(wanted, 1, int64_t(limits.multiprocessors) * 8);
}

int32_t check(const gpu::FocalLoss& a) {
  if (a.type < APEX_F32 || a.type > APEX_F64)
    return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", unit);
  if (a.classes > 0x7fffffff)
    return fail(APEX_ERROR_VALUE, "%s: %lld classes are more than 2^31 - 1", unit, (long long)a.classes);
  return APEX_OK;
}

int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, const gpu::FocalLoss& a) {
  void* parameters[] = {const_cast<gpu::FocalLoss*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(blocks), 1, 1}, {gpu::focal_loss_threads, 1, 1}, 0, parameters);
}
}  // namespace
}  // namespace apex

using namespace apex;

int32_t apex_focal_loss_forward(const apex_place* place, const gpu::FocalLoss* arguments,
                                const apex_workspace* workspace) {
  gpu::FocalLoss a = *arguments;
  if (const int32_t status = check(a)) return status;
  int32_t variant;
  if (const int32_t status = choose_variant(*place, unit, &variant)) return status;
  const bool cpu = variant == APEX_VARIANT_CPU;
  if (cpu) {  // as many parts whatever the number of threads: the sums stay the same
    const int64_t most = std::max<int64_t>(1, std::min<int64_t>(a.rows, 256));
    a.blocks = int32_t(std::clamp<int64_t>(a.rows * a.classes / 16384, 1, most));
  } else {
    DeviceLimits limits;
    if (const int32_t status = device_limits(*place, &limits)) return status;
    a.blocks = int32_t(blocks_of(a, limits));
  }
  if (const int32_t status = take_workspace(workspace, a.blocks * sum_bytes(a.type), &a.partials)) return status;
  if (cpu) {
    focal_loss_forward_cpu(a);
    return APEX_OK;
  }
  if (const int32_t status = launch(place, forward_kernels[a.type], a.blocks, a)) return status;
  return launch(place, finish_kernels[a.type == APEX_F64], 1, a);
}

int32_t apex_focal_loss_backward(const apex_place* place, const gpu::FocalLoss* a) {
  if (const int32_t status = check(*a)) return status;
  int32_t variant;
  if (const int32_t status = choose_variant(*place, unit, &variant)) return status;
  if (a->rows == 0 || a->classes == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    focal_loss_backward_cpu(*a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  return launch(place, backward_kernels[a->type], blocks_of(*a, limits), *a);
}
