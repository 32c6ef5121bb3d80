// Bias and activation: launches. csrc/device/bias_activation.h says what is computed.
#include "bias_activation.h"

#include <algorithm>

#include "device/column_sums.h"
#include "device_limits.h"
#include "dtypes.h"
#include "few_rows.h"
#include "status.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "bias_activation";
constexpr int64_t small_elements = int64_t{1} << 21;  // of an output whose bias's gradient one launch makes

enum Kind { bf16x8, f16x8, f32x4, any1, f64 };
#define APEX_ACTIVATION_KERNEL(name) {unit, "bias_activation_" #name, 0, 1}
#define APEX_ACTIVATION_KINDS(way)                                                                              \
  {APEX_ACTIVATION_KERNEL(way##bf16x8), APEX_ACTIVATION_KERNEL(way##f16x8), APEX_ACTIVATION_KERNEL(way##f32x4), \
   APEX_ACTIVATION_KERNEL(way##any1), APEX_ACTIVATION_KERNEL(way##f64)}
apex_kernel forward_kernels[2][5] = {APEX_ACTIVATION_KINDS(forward_), APEX_ACTIVATION_KINDS(forward_gated_)};
apex_kernel backward_kernels[2][5] = {APEX_ACTIVATION_KINDS(backward_), APEX_ACTIVATION_KINDS(backward_gated_)};
// Of few rows, by kind.
apex_kernel forward_few_kernels[2][3] = {
    {APEX_ACTIVATION_KERNEL(forward_few_bf16x8), APEX_ACTIVATION_KERNEL(forward_few_f16x8),
     APEX_ACTIVATION_KERNEL(forward_few_f32x4)},
    {APEX_ACTIVATION_KERNEL(forward_few_gated_bf16x8), APEX_ACTIVATION_KERNEL(forward_few_gated_f16x8),
     APEX_ACTIVATION_KERNEL(forward_few_gated_f32x4)}};
apex_kernel few_kernels[2][3] = {
    {APEX_ACTIVATION_KERNEL(backward_few_bf16x2), APEX_ACTIVATION_KERNEL(backward_few_f16x2),
     APEX_ACTIVATION_KERNEL(backward_few_f32x2)},
    {APEX_ACTIVATION_KERNEL(backward_few_gated_bf16x2), APEX_ACTIVATION_KERNEL(backward_few_gated_f16x2),
     APEX_ACTIVATION_KERNEL(backward_few_gated_f32x2)}};
apex_kernel finish_kernels[2] = {APEX_ACTIVATION_KERNEL(finish), APEX_ACTIVATION_KERNEL(finish_f64)};

// How threads share the tensor.
struct Layout {
  Kind kind;
  int64_t width;  // elements of a thread's vector
  uint32_t threads;
};

// Whole rows of blocks side by side, as many threads of each on a row as it has. `blocks`: in all, at most;
// `in_flight`: rows of a thread, as far as there are blocks enough without.
Layout lay_out(gpu::BiasActivation& a, int64_t blocks, int64_t least_blocks, int64_t in_flight) {
  const Kind wide = a.type == APEX_BF16 ? bf16x8 : a.type == APEX_F16 ? f16x8 : f32x4;
  const int64_t vector = wide == f32x4 ? 4 : 8;
  uintptr_t bits = 0;
  for (const void* p : {a.input, a.bias, a.grad_output, a.scale, const_cast<const gpu::u8*>(a.output),
                        const_cast<const gpu::u8*>(a.unscaled)})
    bits |= reinterpret_cast<uintptr_t>(p);
  const bool vectors = a.type != APEX_F64 && a.hidden % vector == 0 && bits % 16 == 0;
  const int64_t width = vectors ? vector : 1, lanes = a.hidden / width;
  a.lane_threads = int32_t(std::min<int64_t>(lanes, gpu::bias_activation_threads));
  a.column_blocks = uint32_t(ceil_divide(lanes, a.lane_threads));
  const int64_t slots = gpu::bias_activation_threads / a.lane_threads, most = ceil_divide(a.rows, slots),
                few = std::min(most, least_blocks / a.column_blocks);
  a.parts = std::clamp<int64_t>(ceil_divide(a.rows, slots * in_flight), std::max<int64_t>(1, few),
                                std::max<int64_t>({1, few, blocks / a.column_blocks}));
  return {a.type == APEX_F64 ? f64 : vectors ? wide : any1, width, gpu::bias_activation_threads};
}

// Of a small tensor whose rows are summed: a block takes columns of 64 bytes, or 32 where these leave multiprocessors
// idle, more where its threads have no rows; and all rows if it has them in flight at once or twice. Else the last of
// the blocks that share its columns adds their sums up, few, as they are of many rows.
void take_columns(gpu::BiasActivation& a, const DeviceLimits& limits, Layout& layout) {
  const int64_t lanes = a.hidden / layout.width;
  int64_t narrow = 64 / (layout.width * bytes_of(a.type));
  if (2 * ceil_divide(lanes, narrow) <= limits.multiprocessors) narrow = std::max<int64_t>(1, narrow / 2);
  layout.threads = gpu::bias_activation_most_threads;
  while (narrow < layout.threads && layout.threads / narrow > a.rows) narrow *= 2;
  a.lane_threads = int32_t(std::min(lanes, narrow));
  a.column_blocks = uint32_t(ceil_divide(lanes, a.lane_threads));
  const int64_t turn = layout.threads / a.lane_threads * (a.gated ? 2 : 4), turns = ceil_divide(a.rows, turn);
  a.parts = turns <= 2 ? 1 : std::clamp<int64_t>(limits.multiprocessors * 2 / a.column_blocks, 1, turns);
}

// Rows that a block of the `few` kernels has at once, or in two turns, and so few columns that all blocks are at work.
bool is_of_few_rows(const gpu::BiasActivation& a, const Layout& layout) {
  constexpr int64_t most_elements = int64_t{1} << 18,
                    most_rows = 4 * gpu::bias_activation_few_threads / gpu::bias_activation_few_lanes;
  return layout.kind <= f32x4 && a.rows > 0 && a.rows <= most_rows && a.hidden <= 4096 &&
         a.rows * a.hidden <= most_elements;
}

// The forward of so few elements that all are at work at once with a vector a thread. False: they are more.
bool take_vectors(gpu::BiasActivation& a, const DeviceLimits& limits, const Layout& layout) {
  const int64_t lanes = a.hidden / layout.width;
  if (layout.kind > f32x4 || lanes > 1024 || a.rows * lanes > limits.multiprocessors * threads_at_once) return false;
  a.lane_threads = int32_t(lanes);
  a.lane_share = share_of(lanes);
  return true;
}

int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads, int64_t shared,
               const gpu::BiasActivation& a) {
  void* parameters[] = {const_cast<gpu::BiasActivation*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(blocks), 1, 1}, {threads, 1, 1}, uint32_t(shared), parameters);
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
  const Layout layout = lay_out(a, limits.multiprocessors * 16, limits.multiprocessors * 4, a.gated ? 4 : 8);
  if (take_vectors(a, limits, layout))
    return launch(place, forward_few_kernels[a.gated][layout.kind],
                  ceil_divide(a.rows * a.lane_threads, int64_t(layout.threads)), layout.threads, 0, a);
  return launch(place, forward_kernels[a.gated][layout.kind], a.column_blocks * a.parts, layout.threads, 0, a);
}
int32_t run_backward(const apex_place* place, gpu::BiasActivation a, const apex_workspace* workspace) {
  int32_t variant;
  if (const int32_t status = choose(place, a, &variant)) return status;
  if (a.hidden == 0) return APEX_OK;
  const int64_t columns = columns_of(a), size = sum_bytes(a.type);
  if (variant == APEX_VARIANT_CPU) {
    a.parts = cpu_parts(a.rows);
    if (const int32_t status = take_workspace(workspace, a.grad_bias ? a.parts * columns * size : 0, &a.partials))
      return status;
    bias_activation_backward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  // Sums of the bias's gradient cost memory for every part: with them just as many blocks as run at once.
  const int64_t blocks = int64_t(limits.multiprocessors) * (a.grad_bias ? 4 : 16);
  Layout layout = lay_out(a, blocks, limits.multiprocessors * 4, 4);
  const bool small = a.grad_bias && a.rows * a.hidden <= small_elements;
  if (small && is_of_few_rows(a, layout))
    return launch(place, few_kernels[a.gated][layout.kind], ceil_divide(a.hidden, gpu::bias_activation_few_columns),
                  gpu::bias_activation_few_threads, 0, a);
  if (small) take_columns(a, limits, layout);
  if (a.rows == 0) a.parts = 0;
  const bool parted = a.grad_bias && a.parts != 1;
  const int64_t sums = parted ? a.parts * columns * size : 0;
  if (const int32_t status =
          take_workspace(*place, workspace, sums, parted && small ? a.column_blocks : 0, &a.partials, &a.counters))
    return status;
  const int64_t shared = a.grad_bias ? layout.threads * layout.width * (a.gated ? 2 : 1) * size : 0;
  if (const int32_t status =
          launch(place, backward_kernels[a.gated][layout.kind], a.column_blocks * a.parts, layout.threads, shared, a))
    return status;
  if (!parted || (small && a.parts)) return APEX_OK;
  return launch(place, finish_kernels[a.type == APEX_F64], ceil_divide(columns, gpu::column_sums_columns(columns)),
                gpu::column_sums_threads, 0, a);
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
