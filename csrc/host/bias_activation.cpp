// Bias and activation: launches. csrc/device/bias_activation.h says what is computed.
#include "bias_activation.h"

#include <algorithm>

#include "device/column_sums.h"
#include "device_limits.h"
#include "status.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "bias_activation";

enum Kind { bf16x8, f16x8, f32x4, any1, f64 };
#define APEX_ACTIVATION_KERNEL(name) {unit, "bias_activation_" #name, 0, 1}
#define APEX_ACTIVATION_KINDS(way)                                                                              \
  {APEX_ACTIVATION_KERNEL(way##bf16x8), APEX_ACTIVATION_KERNEL(way##f16x8), APEX_ACTIVATION_KERNEL(way##f32x4), \
   APEX_ACTIVATION_KERNEL(way##any1), APEX_ACTIVATION_KERNEL(way##f64)}
apex_kernel forward_kernels[2][5] = {APEX_ACTIVATION_KINDS(forward_), APEX_ACTIVATION_KINDS(forward_gated_)};
apex_kernel backward_kernels[2][5] = {APEX_ACTIVATION_KINDS(backward_), APEX_ACTIVATION_KINDS(backward_gated_)};
apex_kernel finish_kernels[2] = {APEX_ACTIVATION_KERNEL(finish), APEX_ACTIVATION_KERNEL(finish_f64)};

// How blocks share the tensor.
Kind lay_out(gpu::BiasActivation& a, const DeviceLimits& limits, bool sums_bias) {
  const Kind wide = a.type == APEX_BF16 ? bf16x8 : a.type == APEX_F16 ? f16x8 : f32x4;
  const int64_t vector = wide == f32x4 ? 4 : 8;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a.input) | reinterpret_cast<uintptr_t>(a.output) |
                         reinterpret_cast<uintptr_t>(a.grad_output) | reinterpret_cast<uintptr_t>(a.unscaled);
  const bool vectors = a.type != APEX_F64 && a.hidden % vector == 0 && bits % 16 == 0;
  const int64_t lanes = vectors ? a.hidden / vector : a.hidden;
  a.lane_threads = int32_t(std::min<int64_t>(lanes, gpu::bias_activation_threads));
  a.column_blocks = uint32_t(ceil_divide(lanes, a.lane_threads));
  // Sums of the bias's gradient cost memory for every part: with them just as many blocks as run at once.
  const int64_t blocks = int64_t(limits.multiprocessors) * (sums_bias ? 4 : 16),
                slots = gpu::bias_activation_threads / a.lane_threads;
  a.parts = std::clamp<int64_t>(blocks / a.column_blocks, 1, std::max<int64_t>(1, ceil_divide(a.rows, slots * 4)));
  return a.type == APEX_F64 ? f64 : vectors ? wide : any1;
}
int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads,
               const gpu::BiasActivation& a) {
  void* parameters[] = {const_cast<gpu::BiasActivation*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(blocks), 1, 1}, {threads, 1, 1}, 0, parameters);
}

// Of the CPU variant: as many parts whatever the number of threads, so that the sums stay the same.
int64_t cpu_parts(int64_t rows) { return rows == 0 ? 0 : std::clamp<int64_t>(rows / 16, 1, 64); }

int32_t choose(const apex_place* place, const gpu::BiasActivation& a, int32_t* variant) {
  if (a.bias && (a.type == APEX_F64) != (a.bias_type == APEX_F64))
    return fail(APEX_ERROR_ARGUMENT, "bias_activation: float64 goes with float64 alone: input and bias alike");
  return choose_variant(*place, unit, variant);
}

int32_t run_forward(const apex_place* place, gpu::BiasActivation a) {
  int32_t variant;
  if (const int32_t status = choose(place, a, &variant)) return status;
  if (a.rows == 0 || a.hidden == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    a.parts = std::min<int64_t>(a.rows, 1024);  // nothing is summed: any number does
    bias_activation_forward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const Kind kind = lay_out(a, limits, false);
  return launch(place, forward_kernels[a.gated][kind], a.column_blocks * a.parts, gpu::bias_activation_threads, a);
}
int32_t run_backward(const apex_place* place, gpu::BiasActivation a, const apex_workspace* workspace) {
  int32_t variant;
  if (const int32_t status = choose(place, a, &variant)) return status;
  if (a.hidden == 0) return APEX_OK;
  Kind kind = any1;
  if (variant == APEX_VARIANT_CPU) {
    a.parts = cpu_parts(a.rows);
  } else {
    DeviceLimits limits;
    if (const int32_t status = device_limits(*place, &limits)) return status;
    kind = lay_out(a, limits, a.grad_bias);
  }
  const int64_t sums = a.grad_bias ? a.parts * columns_of(a) : 0;
  if (const int32_t status = take_workspace(workspace, sums * (a.type == APEX_F64 ? 8 : 4), &a.partials)) return status;
  if (variant == APEX_VARIANT_CPU) {
    bias_activation_backward_cpu(a);
    return APEX_OK;
  }
  if (a.rows == 0) a.parts = 0;
  int32_t status = APEX_OK;
  if (a.rows > 0)
    status = launch(place, backward_kernels[a.gated][kind], a.column_blocks * a.parts, gpu::bias_activation_threads, a);
  if (status == APEX_OK && a.grad_bias)
    status = launch(place, finish_kernels[a.type == APEX_F64],
                    ceil_divide(columns_of(a), gpu::column_sums_columns(columns_of(a))), gpu::column_sums_threads, a);
  return status;
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_bias_activation_forward(const apex_place* place, const gpu::BiasActivation* arguments) {
  return apex::run_forward(place, *arguments);
}
extern "C" int32_t apex_bias_activation_backward(const apex_place* place, const gpu::BiasActivation* arguments,
                                                 const apex_workspace* workspace) {
  return apex::run_backward(place, *arguments, workspace);
}
