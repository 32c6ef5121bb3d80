#include "xentropy.h"

#include <algorithm>

#include "device_limits.h"
#include "dtypes.h"
#include "few_rows.h"
#include "status.h"
#include "values.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "xentropy";
// By apex_dtype.
apex_kernel forward_kernels[] = {{unit, "xentropy_forward_f32", 0, 1},
                                 {unit, "xentropy_forward_f16", 0, 1},
                                 {unit, "xentropy_forward_bf16", 0, 1},
                                 {unit, "xentropy_forward_f64", 0, 1}};
apex_kernel backward_kernels[] = {{unit, "xentropy_backward_f32", 0, 1},
                                  {unit, "xentropy_backward_f16", 0, 1},
                                  {unit, "xentropy_backward_bf16", 0, 1},
                                  {unit, "xentropy_backward_f64", 0, 1}};
apex_kernel forward_short_kernels[] = {{unit, "xentropy_forward_short_f32", 0, 1},
                                       {unit, "xentropy_forward_short_f16", 0, 1},
                                       {unit, "xentropy_forward_short_bf16", 0, 1}};
apex_kernel backward_short_kernels[] = {{unit, "xentropy_backward_short_f32", 0, 1},
                                        {unit, "xentropy_backward_short_f16", 0, 1},
                                        {unit, "xentropy_backward_short_bf16", 0, 1}};
apex_kernel forward_few_kernels[] = {{unit, "xentropy_forward_few_f32", 0, 1},
                                     {unit, "xentropy_forward_few_f16", 0, 1},
                                     {unit, "xentropy_forward_few_bf16", 0, 1}};
apex_kernel backward_few_kernels[] = {{unit, "xentropy_backward_few_f32", 0, 1},
                                      {unit, "xentropy_backward_few_f16", 0, 1},
                                      {unit, "xentropy_backward_few_bf16", 0, 1}};
apex_kernel merge_kernels[] = {{unit, "xentropy_merge", 0, 1}, {unit, "xentropy_merge_f64", 0, 1}};

constexpr int64_t vectors_ahead = 4;  // of a thread, in the kernels

struct Layout {
  int64_t blocks, splits;
  uint32_t threads;
  bool warp_rows;
  int64_t rows_a_warp;       // of the `short` kernels; 0: another one's turn
  int32_t log_threads = -1;  // of the `few` kernels; likewise -1
};
int64_t width_of(int32_t type) { return type == APEX_F64 ? 2 : type == APEX_F32 ? 4 : 8; }
// Every row of these tensors begins and ends with a vector of 16 bytes.
bool whole_vectors(int64_t classes, int64_t row_stride, int32_t type, const void* logits, const void* grad_logits) {
  return (classes | row_stride) % width_of(type) == 0 &&
         (reinterpret_cast<uintptr_t>(logits) | reinterpret_cast<uintptr_t>(grad_logits)) % 16 == 0;
}
// `whole`: as whole_vectors says. Splits do not depend on it.
Layout choose(int64_t rows, int64_t classes, int32_t type, bool whole, const DeviceLimits& limits) {
  const int64_t width = width_of(type), vectors = ceil_divide(classes, width);
  const int64_t wanted = ceil_divide(vectors, vectors_ahead);
  if (FewRows few; whole && type != APEX_F64 && take_few_rows(rows, vectors, limits, &few))
    return {few.blocks, 1, few.threads, false, 0, few.log_threads};
  if (whole && type != APEX_F64 && vectors <= gpu::xentropy_short_vectors * limits.warp_size) {
    // One wave of blocks, as many as registers let stay at once; a lane has no more than one row of its own.
    constexpr int64_t threads = gpu::xentropy_short_threads, blocks_at_once = 16;
    const int64_t warps = threads / limits.block_multiple;
    const int64_t rows_a_warp =
        std::min<int64_t>(limits.warp_size, ceil_divide(rows, limits.multiprocessors * blocks_at_once * warps));
    const int64_t blocks = ceil_divide(rows, rows_a_warp * warps);
    if (blocks <= most_threads / threads) return {blocks, 1, uint32_t(threads), true, rows_a_warp};
  }
  if (wanted <= limits.warp_size) {
    constexpr int64_t threads = 256;
    return {ceil_divide(rows, threads / limits.warp_size), 1, uint32_t(threads), true, 0};
  }
  const int64_t threads =
      std::min<int64_t>(gpu::xentropy_threads, ceil_divide(wanted, limits.block_multiple) * limits.block_multiple);
  // Few rows: enough blocks that every multiprocessor has two, as long as each has a round of vectors for its threads.
  const int64_t most = vectors / (threads * vectors_ahead), few = ceil_divide(limits.multiprocessors * 2, rows);
  const int64_t splits = few < 2 ? 1 : std::max<int64_t>(1, std::min(most, few));
  return {rows * splits, splits, uint32_t(threads), false, 0};
}

int32_t check(int32_t logits_type, int32_t other_type, int64_t classes) {
  if (classes > 0x7fffffff)
    return fail(APEX_ERROR_VALUE, "%s: %lld classes are more than 2^31 - 1", unit, (long long)classes);
  const auto known = [](int32_t type) { return type >= APEX_F32 && type <= APEX_F64; };
  if (!known(logits_type) || !known(other_type))
    return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", unit);
  if ((logits_type == APEX_F64) != (other_type == APEX_F64))
    return fail(APEX_ERROR_ARGUMENT, "%s: float64 goes with float64 alone: logits and losses alike", unit);
  return APEX_OK;
}

template <class Arguments> int32_t check_labels(const apex_place& place, const Arguments& a) {
  if (place.platform != APEX_CPU) return APEX_OK;
  for (int64_t i = 0; i < a.rows; ++i) {
    const int64_t label = integer_at(a.labels, i, a.wide_labels);
    const bool ignored = label == gpu::xentropy_ignored_label || (a.has_padding && label == a.padding_index);
    if ((label < 0 || label >= a.classes) && !ignored)
      return fail(APEX_ERROR_INDEX, "%s: label %lld is outside [0, %lld), and neither padding_idx nor -100", unit,
                  (long long)label, (long long)a.classes);
  }
  return APEX_OK;
}

template <class Arguments>
int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads, const Arguments& a) {
  void* parameters[] = {const_cast<Arguments*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(std::min(blocks, most_threads / threads)), 1, 1}, {threads, 1, 1}, 0,
                     parameters);
}
}  // namespace

int32_t run_xentropy_forward(const apex_place& place, gpu::XentropyForward a, const apex_workspace* workspace) {
  if (const int32_t status = check(a.logits_type, a.loss_type, a.classes)) return status;
  int32_t variant;
  if (const int32_t status = choose_variant(place, unit, &variant)) return status;
  a.splits = 1;
  if (a.rows == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    xentropy_forward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(place, &limits)) return status;
  const bool whole = whole_vectors(a.classes, a.row_stride, a.logits_type, a.logits, nullptr);
  const Layout layout = choose(a.rows, a.classes, a.logits_type, whole, limits);
  a.splits = int32_t(layout.splits);
  a.warp_rows = layout.warp_rows;
  a.rows_a_warp = int32_t(layout.rows_a_warp);
  a.log_threads = layout.log_threads;
  if (a.splits > 1) {
    const int64_t bytes = a.rows * a.splits * 3 * sum_bytes(a.logits_type);
    if (const int32_t status = take_workspace(workspace, bytes, &a.partials)) return status;
  }
  apex_kernel* const kernels = layout.log_threads >= 0 ? forward_few_kernels
                               : layout.rows_a_warp    ? forward_short_kernels
                                                       : forward_kernels;
  if (const int32_t status = launch(&place, kernels[a.logits_type], layout.blocks, layout.threads, a)) return status;
  if (a.splits == 1) return APEX_OK;
  constexpr uint32_t threads = 128;
  return launch(&place, merge_kernels[a.logits_type == APEX_F64], ceil_divide(a.rows, threads / limits.block_multiple),
                threads, a);
}

int32_t run_xentropy_backward(const apex_place& place, gpu::XentropyBackward a) {
  if (const int32_t status = check(a.logits_type, a.grad_type, a.classes)) return status;
  int32_t variant;
  if (const int32_t status = choose_variant(place, unit, &variant)) return status;
  if (a.rows == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    xentropy_backward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(place, &limits)) return status;
  const bool whole = whole_vectors(a.classes, a.row_stride, a.logits_type, a.logits, a.grad_logits);
  const Layout layout = choose(a.rows, a.classes, a.logits_type, whole, limits);
  a.splits = int32_t(layout.splits);
  a.warp_rows = layout.warp_rows;
  a.rows_a_warp = int32_t(layout.rows_a_warp);
  a.log_threads = layout.log_threads;
  apex_kernel* const kernels = layout.log_threads >= 0 ? backward_few_kernels
                               : layout.rows_a_warp    ? backward_short_kernels
                                                       : backward_kernels;
  return launch(&place, kernels[a.logits_type], layout.blocks, layout.threads, a);
}
}  // namespace apex

int32_t apex_xentropy_forward(const apex_place* place, const gpu::XentropyForward* arguments,
                              const apex_workspace* workspace) {
  if (const int32_t status = apex::check_labels(*place, *arguments)) return status;
  return apex::run_xentropy_forward(*place, *arguments, workspace);
}

int32_t apex_xentropy_backward(const apex_place* place, const gpu::XentropyBackward* arguments) {
  if (const int32_t status = apex::check_labels(*place, *arguments)) return status;
  return apex::run_xentropy_backward(*place, *arguments);
}
