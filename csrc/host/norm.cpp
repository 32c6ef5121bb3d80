#include "norm.h"

#include <algorithm>
#include <initializer_list>

#include "device/norm_layout.h"
#include "device_limits.h"
#include "status.h"

namespace apex {
namespace {
constexpr int64_t most_blocks = 0x7fffffff;
int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t bytes_of(int32_t type) { return type == APEX_F64 ? 8 : type == APEX_F32 ? 4 : 2; }

bool aligned(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 0;
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  return bits % 16 == 0;
}

// How the threads share a row.
struct Layout {
  int kernel;      // index in the op's table
  bool in_registers, warp_rows;
  uint32_t threads;
  int64_t elements;  // a thread, in registers
};

int64_t whole_warps(int64_t threads, const DeviceLimits& limits) {
  return ceil_divide(threads, limits.block_multiple) * limits.block_multiple;
}

Layout choose_long(int64_t hidden, bool vectors, bool doubles, const DeviceLimits& limits) {
  const int64_t width = vectors && hidden % 8 == 0 && !doubles ? 8 : 1;
  const int64_t threads = whole_warps(ceil_divide(hidden, width), limits);
  return {doubles ? 2 : width == 8 ? 0 : 1, false, false, uint32_t(std::min<int64_t>(gpu::norm_threads, threads)), 0};
}

// `vectors`: every tensor's memory begins at a multiple of 16 bytes.
Layout choose(int64_t hidden, int32_t input_type, int32_t output_type, bool vectors, const DeviceLimits& limits) {
  const bool doubles = input_type == APEX_F64, halves = input_type == output_type && bytes_of(input_type) == 2;
  const int64_t width = halves ? 8 : 4;
  if (doubles || !vectors || hidden % width != 0) return choose_long(hidden, vectors, doubles, limits);
  // The table: of halves four kernels a type, 8, 16, 24 and 32 elements a thread; of others three, 8, 16 and 32.
  static constexpr int64_t elements[] = {8, 16, 24, 32, 8, 16, 24, 32, 8, 16, 32, 8, 16, 32};
  const int first = input_type != output_type ? 11 : input_type == APEX_BF16 ? 0 : input_type == APEX_F16 ? 4 : 8;
  const int last = first + (halves ? 4 : 3);
  for (int i = first; i < last; ++i)
    if (ceil_divide(hidden, elements[i]) <= limits.warp_size) return {i, true, true, 256, elements[i]};
  for (const int64_t most : {int64_t(256), int64_t(gpu::norm_threads)})
    for (int i = first; i < last; ++i) {
      const int64_t threads = whole_warps(ceil_divide(hidden, elements[i]), limits);
      if (threads <= most) return {i, true, false, uint32_t(threads), elements[i]};
    }
  return choose_long(hidden, vectors, doubles, limits);
}

int64_t row_bytes(int64_t hidden, int32_t type) { return (hidden * bytes_of(type) + 15) / 16 * 16; }

// Blocks that stay, each with several rows on their way in shared memory. No stages: a row does not fit there.
struct Residence {
  int64_t blocks, stages, shared;
};
Residence reside(const apex_place* place, const DeviceLimits& limits, const Layout& layout, int64_t rows, int64_t stage_bytes,
                 int64_t weight_bytes, int64_t threads_at_once) {
  const int64_t teams = layout.warp_rows ? layout.threads / limits.warp_size : 1;
  const int64_t at_once = std::max<int64_t>(1, threads_at_once / layout.threads);  // of a multiprocessor
  const int64_t budget = limits.shared_bytes / at_once - 2048 - weight_bytes;  // beside static shared memory
  // Only NVIDIA's copies to shared memory run beside the threads, so only there is it of use to be ahead.
  const int64_t most_stages = place->platform == APEX_HIP ? 1 : 2;
  const int64_t stages = std::min<int64_t>(most_stages, budget / (teams * stage_bytes));
  return {std::min<int64_t>(limits.multiprocessors * at_once, ceil_divide(rows, teams)), stages, teams * stages * stage_bytes + weight_bytes};
}

template <class Arguments>
int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads, int64_t shared, const Arguments& a) {
  void* parameters[] = {const_cast<Arguments*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(std::min(blocks, most_blocks)), 1, 1}, {threads, 1, 1}, uint32_t(shared), parameters);
}

// What one launch of the backward does, from arguments alone, so that prepare and run agree.
struct BackwardPlan {
  Layout layout;
  int64_t blocks, shared;
};

int32_t plan_backward(const NormOp& op, const apex_place* place, gpu::NormBackward& a, BackwardPlan* plan) {
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const bool vectors = aligned({a.grad_output, a.saved, a.grad_sum, a.weight, a.bias, a.grad_input});
  Layout layout = choose(a.hidden, a.input_type, a.output_type, vectors, limits);
  if (layout.in_registers) {
    const int64_t stage_bytes = row_bytes(a.hidden, a.from_output ? a.output_type : a.input_type) + row_bytes(a.hidden, a.output_type);
    const int64_t weight_bytes = layout.elements <= (op.centered ? gpu::norm_most_kept_backward_centered : gpu::norm_most_kept_backward) ? 0 : a.hidden * 4;
    const Residence r = reside(place, limits, layout, a.rows, stage_bytes, weight_bytes, 512);
    if (r.stages >= 1) {
      a.warp_rows = layout.warp_rows;
      a.stages = int32_t(r.stages);
      a.parts = r.blocks;
      const int64_t sums = layout.warp_rows ? a.hidden * 8 : 0;  // the teams' gradients of weight and bias, at the end
      *plan = {layout, a.parts, std::max(r.shared, sums)};
      return APEX_OK;
    }
    layout = choose_long(a.hidden, vectors, false, limits);
  }
  int64_t wide = limits.block_multiple;
  while (wide < gpu::norm_threads && wide < a.hidden) wide *= 2;
  a.column_threads = int32_t(wide);
  a.column_blocks = int32_t(ceil_divide(a.hidden, wide));
  const int64_t high = gpu::norm_threads / wide, wanted = ceil_divide(limits.multiprocessors * 4, a.column_blocks);
  a.parts = std::min<int64_t>(wanted, ceil_divide(a.rows, high * 4));
  *plan = {layout, a.rows, 0};
  return APEX_OK;
}

bool is_math(int32_t type) { return type >= APEX_F32 && type <= APEX_F64; }

int32_t check(const NormOp& op, int32_t input, int32_t output, int32_t weight, bool has_weight) {
  if (!is_math(input) || !is_math(output) || (has_weight && !is_math(weight)))
    return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", op.unit);
  if ((input == APEX_F64) != (output == APEX_F64) || (has_weight && (input == APEX_F64) != (weight == APEX_F64)))
    return fail(APEX_ERROR_ARGUMENT, "%s: float64 goes with float64 alone: input, weight and output alike", op.unit);
  return APEX_OK;
}
}  // namespace

int32_t run_norm_forward(NormOp& op, const apex_place* place, gpu::NormForward a) {
  if (const int32_t status = check(op, a.input_type, a.output_type, a.weight_type, a.weight)) return status;
  const int32_t variant = apex_resolve(place->platform, place->device, op.unit);
  if (variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;
  if (variant == APEX_VARIANT_REFERENCE) return APEX_USE_REFERENCE;
  if (a.rows == 0 || a.hidden == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    norm_forward_cpu(op.centered, a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const bool vectors = aligned({a.input, a.residual, a.sum, a.weight, a.bias, a.output});
  Layout layout = choose(a.hidden, a.input_type, a.output_type, vectors, limits);
  if (layout.in_registers) {
    const int64_t stage_bytes = row_bytes(a.hidden, a.input_type) * (a.residual ? 2 : 1);
    const int64_t weight_bytes = layout.elements <= gpu::norm_most_kept_forward ? 0 : a.hidden * (op.centered ? 8 : 4);
    const Residence r = reside(place, limits, layout, a.rows, stage_bytes, weight_bytes, 768);
    if (r.stages >= 1) {
      a.warp_rows = layout.warp_rows;
      a.stages = int32_t(r.stages);
      return launch(place, op.forward_rows[layout.kernel], r.blocks, layout.threads, r.shared, a);
    }
    layout = choose_long(a.hidden, vectors, false, limits);
  }
  return launch(place, op.forward_long[layout.kernel], a.rows, layout.threads, 0, a);
}

int32_t prepare_norm_backward(NormOp& op, const apex_place* place, gpu::NormBackward* a) {
  if (const int32_t status = check(op, a->input_type, a->output_type, a->weight_type, a->weight)) return status;
  const int32_t variant = apex_resolve(place->platform, place->device, op.unit);
  if (variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;
  if (variant == APEX_VARIANT_REFERENCE) return APEX_USE_REFERENCE;
  if (variant == APEX_VARIANT_CPU) {  // as many parts whatever the number of threads: the sums stay the same
    a->parts = a->rows == 0 ? 0 : std::clamp<int64_t>(a->rows / 16, 1, 64);
    return APEX_OK;
  }
  BackwardPlan plan;
  return plan_backward(op, place, *a, &plan);
}

int32_t run_norm_backward(NormOp& op, const apex_place* place, const gpu::NormBackward& prepared) {
  if (prepared.hidden == 0) return APEX_OK;
  const int32_t variant = apex_resolve(place->platform, place->device, op.unit);
  if (variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;
  if (variant == APEX_VARIANT_REFERENCE) return APEX_USE_REFERENCE;
  if (variant == APEX_VARIANT_CPU) {
    norm_backward_cpu(op.centered, prepared);
    return APEX_OK;
  }
  gpu::NormBackward a = prepared;
  BackwardPlan plan;
  int32_t status = plan_backward(op, place, a, &plan);
  const bool doubles = a.input_type == APEX_F64;
  if (status == APEX_OK && a.rows > 0) {
    apex_kernel& kernel = (plan.layout.in_registers ? op.backward_rows : op.backward_long)[plan.layout.kernel];
    status = launch(place, kernel, plan.blocks, plan.layout.threads, plan.shared, a);
    if (status == APEX_OK && a.grad_weight && !plan.layout.in_registers)
      status = launch(place, op.columns[doubles], a.column_blocks * a.parts, gpu::norm_threads, 0, a);
  }
  if (status == APEX_OK && a.grad_weight)
    status = launch(place, op.finish[doubles], ceil_divide(a.hidden, gpu::norm_sum_columns), gpu::norm_threads, 0, a);
  return status;
}
}  // namespace apex
