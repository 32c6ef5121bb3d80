#include "group_norm.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "device_limits.h"
#include "dtypes.h"
#include "status.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "group_norm";
// By apex_dtype; the last one takes single elements of any type but float64.
#define KERNELS(part)                        \
  {{unit, "group_norm_" part "_f32", 0, 1},  \
   {unit, "group_norm_" part "_f16", 0, 1},  \
   {unit, "group_norm_" part "_bf16", 0, 1}, \
   {unit, "group_norm_" part "_f64", 0, 1},  \
   {unit, "group_norm_" part "_any1", 0, 1}}
#define TILE_KERNELS(part)                  \
  {{unit, "group_norm_" part "_f32", 0, 1}, \
   {unit, "group_norm_" part "_f16", 0, 1}, \
   {unit, "group_norm_" part "_bf16", 0, 1}}
// [channels last]
apex_kernel statistics[2][5] = {KERNELS("statistics_first"), KERNELS("statistics_last")};
apex_kernel apply[2][5] = {KERNELS("apply_first"), KERNELS("apply_last")};
apex_kernel sums[2][5] = {KERNELS("sums_first"), KERNELS("sums_last")};
apex_kernel gradient[2][5] = {KERNELS("gradient_first"), KERNELS("gradient_last")};
apex_kernel forward_tile[3] = TILE_KERNELS("forward_tile"), backward_tile[3] = TILE_KERNELS("backward_tile");
apex_kernel finish = {unit, "group_norm_finish", 0, 1};

constexpr int64_t vector_bytes = 16;
constexpr int64_t small_tile = 100 << 10;   // of which a large multiprocessor holds two
constexpr int64_t most_channels = 1 << 27;  // kernels count them, and blocks of some, in 32 bits
constexpr int64_t longest_sum = 1024;       // vectors that a thread adds up one by one: longer sums would round
int32_t asked_launches = 0;

int64_t width_of(int32_t type) { return type == APEX_F64 ? 1 : type == APEX_F32 ? 4 : 8; }
bool aligned(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 0;
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  return bits % vector_bytes == 0;
}
int64_t whole_warps(int64_t threads, const DeviceLimits& limits) {
  return ceil_divide(threads, limits.block_multiple) * limits.block_multiple;
}
int32_t kernel_of(int32_t type, int64_t width) { return width == width_of(type) ? type : 4; }
// Of what a block merges: a count and 2 * width numbers a thread, two numbers a group.
int64_t merge_bytes(int64_t threads, int64_t width, int32_t type) {
  return (2 * width + 3) * threads * sum_bytes(type);
}
bool empty(const gpu::GroupNorm& a) { return a.batch == 0 || a.channels == 0 || a.spatial == 0; }
bool wants_weights(const gpu::GroupNorm& a) { return a.grad_weight || a.grad_bias; }

// Of `count` vectors that so many threads go through side by side: as many parts as wanted, if each is some work.
int64_t parts_of(int64_t count, int64_t threads, int64_t wanted) {
  return std::max<int64_t>(ceil_divide(count, threads * longest_sum), std::min<int64_t>(wanted, count / (threads * 4)));
}

// Columns of whole groups in whole vectors: at least so many, or all there are.
int64_t columns_of_whole_groups(const gpu::GroupNorm& a, int64_t width, int64_t least_columns) {
  const int64_t group = a.channels / a.groups, columns = std::lcm(group, width) / width;
  return columns *
         std::min<int64_t>(ceil_divide(least_columns, columns), ceil_divide(ceil_divide(a.channels, width), columns));
}

struct GroupNormPlan {
  int32_t variant;
  bool in_one_launch;   // an image's groups stay in shared memory
  int32_t kernel;       // of the tables
  int32_t sums_kernel;  // likewise, of the backward's sums, channels first
  uint32_t threads, sums_threads;
  int64_t blocks, sums_blocks;  // of the launch that writes, and of the one before
  int64_t shared;               // bytes
  bool finishes;                // the backward's launch makes the weights' gradients, too
};

// Of halves whose groups fill vectors. False: images are large, and two launches keep the memory busier.
bool plan_halves(gpu::GroupNorm& a, GroupNormPlan& plan, bool backward, const DeviceLimits& limits) {
  constexpr int64_t width = 8, numbers = 2 * width, most_rows = 512, most_items = 1 << 24;
  constexpr int64_t most_threads_of_block = gpu::group_norm_halves_threads;
  constexpr int64_t most_images = 256;  // that few threads add up: of more, a launch of its own does it sooner
  if (a.channels / a.groups < width || !aligned({a.weight, a.bias})) return false;
  if (a.spatial > most_rows && asked_launches != 1) return false;
  const int64_t columns = columns_of_whole_groups(a, width, 4), strips = ceil_divide(a.channels, columns * width);
  const int64_t least_threads = std::max<int64_t>(whole_warps(columns * numbers, limits), limits.block_multiple);
  if (least_threads > most_threads_of_block || a.batch * strips > most_items || a.spatial > most_items) return false;
  // Threads that leave the fewest places for rows empty: more of them would leave registers for fewer blocks.
  int64_t rows = 0, threads = 0;
  for (int64_t some = least_threads; some <= most_threads_of_block; some += limits.block_multiple) {
    const int64_t of_some = ceil_divide(a.spatial, some / columns);
    if (threads && of_some * some > rows * threads) continue;
    rows = of_some;
    threads = some;
  }
  const int64_t of_merge = (backward ? numbers * (threads + 3 * columns) + 3 * threads : 6 * threads) * 4;
  const int64_t shared = of_merge + rows * threads * vector_bytes * (backward ? 2 : 1);
  if (shared > limits.shared_bytes - 64) return false;  // the kernel has some of its own
  a.columns = uint32_t(columns);
  a.lanes = uint32_t(threads / columns);
  a.strips = uint32_t(strips);
  a.parts = 1;
  plan.in_one_launch = true;
  plan.finishes = a.batch <= most_images;
  plan.threads = uint32_t(threads);
  plan.blocks = a.batch * strips;
  plan.shared = shared;
  return true;
}

// False: an image's groups do not fit.
bool plan_tile(gpu::GroupNorm& a, GroupNormPlan& plan, int64_t width, bool backward, const DeviceLimits& limits) {
  constexpr int64_t few_threads = 160;
  for (int64_t most = limits.block_multiple; most <= gpu::group_norm_tile_threads; most += limits.block_multiple) {
    // Rows enough for each thread that they outweigh what it does once, though at first threads that wait less count
    // for more; threads enough for large tiles.
    const int64_t rows_of_thread = most <= few_threads ? (backward ? 8 : 10) : backward ? 12 : 20;
    // Of small images several strips, so that threads have something to do.
    int64_t columns = columns_of_whole_groups(a, width, 4);
    const int64_t wide = std::min<int64_t>(most / width, ceil_divide(limits.block_multiple * 2, a.spatial));
    if (columns < wide) columns = columns_of_whole_groups(a, width, wide - columns + 1);
    if (columns * width > most) continue;
    if (columns * a.spatial > most * rows_of_thread && most < gpu::group_norm_tile_threads) continue;
    const int64_t lanes = std::min<int64_t>(most / columns, a.spatial);
    const int64_t threads =
        std::max<int64_t>(whole_warps(columns * lanes, limits), whole_warps(columns * width, limits));
    const int64_t tile = ceil_divide(a.spatial, lanes) * threads * vector_bytes * (backward ? 2 : 1);
    const int64_t shared = merge_bytes(threads, width, a.input_type) + tile,
                  strips = ceil_divide(a.channels, columns * width);
    if (shared > limits.shared_bytes) continue;
    // One large block a multiprocessor, and few of them: two launches use them all.
    if (shared > small_tile && a.batch * strips < limits.multiprocessors && asked_launches != 1) continue;
    a.columns = uint32_t(columns);
    a.lanes = uint32_t(lanes);
    a.strips = uint32_t(strips);
    a.parts = 1;
    plan.in_one_launch = true;
    plan.threads = uint32_t(threads);
    plan.blocks = a.batch * strips;
    plan.shared = shared;
    return true;
  }
  return false;
}

void plan_last(gpu::GroupNorm& a, GroupNormPlan& plan, int64_t width, bool backward, const DeviceLimits& limits) {
  constexpr int64_t threads = gpu::group_norm_threads;
  int64_t columns = columns_of_whole_groups(a, width, width == 1 ? 32 : 8);
  if (columns * width > threads) columns = width == 1 ? 64 : 16;  // groups spread over strips
  const int64_t group = a.channels / a.groups, strip = columns * width;
  const int64_t of_part = strip % group == 0 ? 1 : (group - 1) / strip + 2;
  a.columns = uint32_t(columns);
  a.lanes = uint32_t(threads / columns);
  a.strips = uint32_t(ceil_divide(a.channels, strip));
  const int64_t wanted = limits.multiprocessors * (backward ? 2 : 3) / (a.batch * a.strips);
  const int64_t parts = parts_of(a.spatial, a.lanes, wanted);
  a.part_size = ceil_divide(a.spatial, parts);
  a.parts = uint32_t(ceil_divide(a.spatial, a.part_size));
  a.slots = uint32_t(a.parts * of_part);
  plan.threads = plan.sums_threads = uint32_t(threads);
  plan.blocks = plan.sums_blocks = a.batch * a.strips * a.parts;
  plan.shared = merge_bytes(threads, width, a.input_type);
}

void plan_first(gpu::GroupNorm& a, GroupNormPlan& plan, bool vectors, bool backward, const DeviceLimits& limits) {
  const int64_t stretch = a.channels / a.groups * a.spatial, wide = width_of(a.input_type);
  const int64_t width = vectors && stretch % wide == 0 ? wide : 1, of_stretch = stretch / width;
  const int64_t threads = std::min<int64_t>(gpu::group_norm_threads, whole_warps(ceil_divide(of_stretch, 2), limits));
  const int64_t wanted = limits.multiprocessors * 3 / (a.batch * a.groups);
  a.slots = uint32_t(parts_of(of_stretch, threads, wanted));
  plan.kernel = kernel_of(a.input_type, width);
  plan.threads = plan.sums_threads = uint32_t(threads);
  plan.blocks = plan.sums_blocks = a.batch * a.groups * a.slots;
  if (!backward) return;
  const int64_t of_channel_width = vectors && a.spatial % wide == 0 ? wide : 1,
                of_channel = a.spatial / of_channel_width;
  a.team = 1;
  while (a.team < uint32_t(limits.warp_size) && a.team < of_channel) a.team *= 2;
  const int64_t teams = gpu::group_norm_threads / a.team,
                wanted_teams = limits.multiprocessors * 3 * teams / (a.batch * a.channels);
  const int64_t parts = parts_of(of_channel, a.team, wanted_teams);
  a.part_size = ceil_divide(of_channel, parts);
  a.parts = uint32_t(ceil_divide(of_channel, a.part_size));
  plan.sums_kernel = kernel_of(a.input_type, of_channel_width);
  plan.sums_threads = gpu::group_norm_threads;
  plan.sums_blocks = ceil_divide(a.batch * a.channels * a.parts, teams);
}

int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads, int64_t shared,
               const gpu::GroupNorm& a) {
  void* parameters[] = {const_cast<gpu::GroupNorm*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(std::min<int64_t>(blocks, most_threads / threads)), 1, 1},
                     {threads, 1, 1}, uint32_t(shared), parameters);
}
int32_t check(const gpu::GroupNorm& a) {
  for (const int32_t type : {a.input_type, a.weight_type})
    if (type < APEX_F32 || type > APEX_F64)
      return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", unit);
  if ((a.input_type == APEX_F64) != (a.weight_type == APEX_F64))
    return fail(APEX_ERROR_ARGUMENT, "%s: float64 goes with float64 alone: input, weight and bias alike", unit);
  if (a.groups < 1 || a.channels % a.groups != 0)
    return fail(APEX_ERROR_VALUE, "%s: %lld channels cannot be parted into %lld groups", unit, (long long)a.channels,
                (long long)a.groups);
  return APEX_OK;
}

// Fills in the geometry, and what kernels leave for each other.
int32_t prepare(const apex_place& place, gpu::GroupNorm& a, bool backward, GroupNormPlan& plan,
                const apex_workspace* workspace) {
  if (const int32_t status = check(a)) return status;
  if (const int32_t status = choose_variant(place, unit, &plan.variant)) return status;
  if (empty(a)) return APEX_OK;
  a.parts = a.slots = 1;
  int64_t of_groups = 0, of_channels = 0;
  if (plan.variant == APEX_VARIANT_CPU) {
    of_channels = backward ? a.batch * 2 * a.channels : 0;
  } else {
    if (a.channels > most_channels) return APEX_USE_REFERENCE;
    DeviceLimits limits;
    if (const int32_t status = device_limits(place, &limits)) return status;
    const bool vectors = aligned({a.input, a.grad_output, a.output});
    if (a.channels_last) {
      const int64_t width = vectors && a.channels % width_of(a.input_type) == 0 ? width_of(a.input_type) : 1;
      plan.kernel = plan.sums_kernel = kernel_of(a.input_type, width);
      const bool fits = asked_launches != 2 && (width == 8   ? plan_halves(a, plan, backward, limits)
                                                : width == 4 ? plan_tile(a, plan, width, backward, limits)
                                                             : false);
      if (!fits) plan_last(a, plan, width, backward, limits);
    } else {
      plan_first(a, plan, vectors, backward, limits);
    }
    if (!plan.in_one_launch && (!backward || a.channels_last)) of_groups = a.batch * a.groups * a.slots * 2;
    if (backward && (wants_weights(a) || !a.channels_last)) of_channels = a.batch * a.parts * 2 * a.channels;
    a.apply_blocks = uint32_t(std::min<int64_t>(plan.blocks, most_threads / plan.threads / 2));
  }
  const int64_t item = sum_bytes(a.input_type), first = ceil_divide(of_groups * item, 16) * 16;
  const int64_t of_strips = plan.finishes && of_channels ? a.strips : 0;
  uint8_t* memory;
  uint32_t* counters;
  if (const int32_t status =
          take_workspace(place, workspace, first + of_channels * item, of_strips, &memory, &counters))
    return status;
  a.counters = of_strips ? counters : nullptr;
  if (of_groups) a.group_partials = memory;
  if (of_channels) a.channel_partials = memory + first;
  return APEX_OK;
}
}  // namespace
}  // namespace apex

using namespace apex;

void apex_set_group_norm_launches(int32_t launches) { asked_launches = launches; }

int32_t apex_group_norm_forward(const apex_place* place, const gpu::GroupNorm* arguments,
                                const apex_workspace* workspace) {
  gpu::GroupNorm a = *arguments;
  GroupNormPlan plan{};
  if (const int32_t status = prepare(*place, a, false, plan, workspace)) return status;
  if (empty(a)) return APEX_OK;
  if (plan.variant == APEX_VARIANT_CPU) {
    group_norm_forward_cpu(a);
    return APEX_OK;
  }
  if (plan.in_one_launch) return launch(place, forward_tile[a.input_type], plan.blocks, plan.threads, plan.shared, a);
  if (const int32_t status =
          launch(place, statistics[a.channels_last][plan.kernel], plan.sums_blocks, plan.sums_threads, plan.shared, a))
    return status;
  return launch(place, apply[a.channels_last][plan.kernel], plan.blocks, plan.threads, plan.shared, a);
}

int32_t apex_group_norm_backward(const apex_place* place, const gpu::GroupNorm* arguments,
                                 const apex_workspace* workspace) {
  gpu::GroupNorm a = *arguments;
  GroupNormPlan plan{};
  if (const int32_t status = prepare(*place, a, true, plan, workspace)) return status;
  if (empty(a)) return APEX_OK;
  if (plan.variant == APEX_VARIANT_CPU) {
    group_norm_backward_cpu(a);
    return APEX_OK;
  }
  const int64_t finish_blocks = wants_weights(a) ? ceil_divide(a.channels, gpu::group_norm_finish_columns) : 0;
  if (plan.in_one_launch) {
    if (const int32_t status = launch(place, backward_tile[a.input_type], plan.blocks, plan.threads, plan.shared, a))
      return status;
    if (plan.finishes) return APEX_OK;
    return launch(place, finish, finish_blocks, gpu::group_norm_threads, 0, a);
  }
  if (const int32_t status =
          launch(place, sums[a.channels_last][plan.sums_kernel], plan.sums_blocks, plan.sums_threads, plan.shared, a))
    return status;
  return launch(place, gradient[a.channels_last][plan.kernel], a.apply_blocks + finish_blocks, plan.threads,
                plan.shared, a);
}
