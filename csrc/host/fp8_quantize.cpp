// Casts to FP8: launches. csrc/device/fp8_quantize.h says what is computed.
#include "fp8_quantize.h"

#include "device/column_sums.h"
#include "device_limits.h"
#include "fp8_checks.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "fp8_quantize";

enum Kind { bf16x8, f16x8, f32x4, any1 };
#define APEX_FP8_KERNEL(name) {unit, "fp8_quantize_" #name, 0, 1}
#define APEX_FP8_KINDS(way)                                                                   \
  {APEX_FP8_KERNEL(way##_bf16x8), APEX_FP8_KERNEL(way##_f16x8), APEX_FP8_KERNEL(way##_f32x4), \
   APEX_FP8_KERNEL(way##_any1)}
// By source and whether it is gated.
apex_kernel kernels[3][2][4] = {{APEX_FP8_KINDS(input), APEX_FP8_KINDS(input)},
                                {APEX_FP8_KINDS(activation), APEX_FP8_KINDS(activation_gated)},
                                {APEX_FP8_KINDS(gradient), APEX_FP8_KINDS(gradient_gated)}};
apex_kernel sums_kernel = APEX_FP8_KERNEL(sums);

int64_t width_of_result(const gpu::Fp8Quantize& a) {
  return a.columns * (a.gated && a.source == gpu::fp8_of_gradient ? 2 : 1);
}

// Rows alone may be cut anywhere: into some that are as wide as a tile.
void cut_rows(gpu::Fp8Quantize& a) {
  if (a.source != gpu::fp8_of_input || a.by_column || a.grad_bias) return;
  const int64_t count = a.rows * a.columns;
  for (const int64_t columns : {1024, 128, 64, 16}) {
    if (count % columns) continue;
    a.columns = columns, a.rows = count / columns;
    return;
  }
}
Kind lay_out(gpu::Fp8Quantize& a) {
  const Kind wide = a.type == APEX_BF16 ? bf16x8 : a.type == APEX_F16 ? f16x8 : f32x4;
  const int64_t vector = wide == f32x4 ? 4 : 8;
  const bool vectors = a.columns % vector == 0 && (bits_of(a.input) | bits_of(a.before)) % 16 == 0 &&
                       bits_of(a.by_row) % uintptr_t(vector) == 0;
  a.wide_columns = a.rows % 16 == 0 && bits_of(a.by_column) % 16 == 0;
  a.column_blocks = uint32_t(ceil_divide(a.columns, gpu::fp8_lanes * (vectors ? vector : 1)));
  return vectors ? wide : any1;
}
int32_t check(const gpu::Fp8Quantize& a) {
  const void* scale = a.scale ? a.scale : a.scale_inv;
  if (const int32_t status = check_fp8(unit, a.type, a.format, scale, "scale")) return status;
  if (a.source < gpu::fp8_of_input || a.source > gpu::fp8_of_gradient)
    return fail(APEX_ERROR_ARGUMENT, "fp8_quantize: the source is none of fp8_of_input, _activation, _gradient");
  if (a.source == gpu::fp8_of_gradient && !a.before && a.rows * a.columns > 0)
    return fail(APEX_ERROR_ARGUMENT, "fp8_quantize: of a gradient, `before` is missing");
  return APEX_OK;
}
int32_t launch_pass(const apex_place* place, gpu::Fp8Quantize& a) {
  if (a.rows == 0) return APEX_OK;
  void* parameters[] = {&a};
  const Kind kind = lay_out(a);
  const uint32_t blocks = a.column_blocks * uint32_t(ceil_divide(a.rows, gpu::fp8_tile_rows));
  return apex_launch(place, &kernels[a.source][a.gated ? 1 : 0][kind], {blocks, 1, 1}, {gpu::fp8_tile_threads, 1, 1}, 0,
                     parameters);
}
// The pass that makes a scale: it writes nothing else.
gpu::Fp8Quantize magnitude_of(gpu::Fp8Quantize a) {
  a.by_row = a.by_column = a.partials = a.grad_bias = nullptr, a.amax = nullptr;
  cut_rows(a);
  return a;
}
int32_t launch_all(const apex_place* place, gpu::Fp8Quantize a) {
  if (!a.scale) {
    gpu::Fp8Quantize first = magnitude_of(a);
    if (const int32_t status = launch_pass(place, first)) return status;
    a.scale = a.made_scale, a.counters = nullptr;
  }
  cut_rows(a);
  const int32_t status = launch_pass(place, a);
  if (status != APEX_OK || !a.grad_bias) return status;
  void* parameters[] = {&a};
  const int64_t width = width_of_result(a);
  const uint32_t blocks = uint32_t(ceil_divide(width, gpu::column_sums_columns(width)));
  return apex_launch(place, &sums_kernel, {blocks, 1, 1}, {gpu::column_sums_threads, 1, 1}, 0, parameters);
}
void run_on_cpu(gpu::Fp8Quantize a) {
  float scale = 1.0f, amax = 0.0f;
  if (!a.scale) {
    gpu::Fp8Quantize first = magnitude_of(a);
    first.scale = &scale, first.amax = &amax;
    fp8_quantize_cpu(first);
    scale = gpu::current_scale(amax, gpu::Fp8(a.format).maximum(), a.epsilon, a.power_of_two);
    *a.scale_inv = 1.0f / scale, a.scale = &scale;
  }
  cut_rows(a);
  fp8_quantize_cpu(a);
}
// What it needs beside its arguments: sums of parts, and where a scale is made that and counters.
int32_t take_memory(const apex_place& place, const apex_workspace* workspace, gpu::Fp8Quantize& a) {
  const int64_t sums = a.grad_bias ? ceil_divide(a.rows, gpu::fp8_tile_rows) * width_of_result(a) : 0;
  const int64_t bytes = sums * int64_t(sizeof(float));
  if (a.scale) return take_workspace(workspace, bytes, &a.partials);
  uint8_t* memory;
  constexpr int64_t apart = 16;
  if (const int32_t status = take_workspace(place, workspace, bytes + apart, 2, &memory, &a.counters)) return status;
  a.made_scale = reinterpret_cast<float*>(memory), a.partials = sums ? memory + apart : nullptr;
  return APEX_OK;
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_fp8_quantize(const apex_place* place, const gpu::Fp8Quantize* arguments,
                                     const apex_workspace* workspace) {
  gpu::Fp8Quantize a = *arguments;
  if (const int32_t status = apex::check(a)) return status;
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, apex::unit, &variant)) return status;
  if (a.columns == 0) return APEX_OK;
  if (a.source == gpu::fp8_of_input) a.gated = 0;
  if (const int32_t status = apex::take_memory(*place, workspace, a)) return status;
  if (variant != APEX_VARIANT_CPU) return apex::launch_all(place, a);
  apex::run_on_cpu(a);
  return APEX_OK;
}
