#include "norm.h"

#include <algorithm>
#include <initializer_list>

#include "device/norm_layout.h"
#include "device_limits.h"
#include "driver.h"
#include "dtypes.h"
#include "status.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr int64_t shared_vector = 16,
                  shared_beside = 2048;  // bytes: of a vector in a stage; what the kernel and the driver use besides

bool aligned(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 0;
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  return bits % 16 == 0;
}

apex_norm_layout asked_layouts[2] = {};  // of forward and backward

// How the threads share a row.
struct Layout {
  int kernel;  // index in the op's table
  bool in_registers, warp_rows;
  int64_t threads;
  int64_t width, vectors;  // in registers: elements of a vector, vectors a thread
};

int64_t whole_warps(int64_t threads, const DeviceLimits& limits) {
  return ceil_divide(threads, limits.block_multiple) * limits.block_multiple;
}

Layout choose_long(int64_t hidden, bool vectors, bool doubles, const DeviceLimits& limits) {
  const int64_t width = vectors && hidden % 8 == 0 && !doubles ? 8 : 1;
  const int64_t threads = whole_warps(ceil_divide(hidden, width), limits);
  return {doubles ? 2 : width == 8 ? 0 : 1, false, false, std::min<int64_t>(gpu::norm_threads, threads), width, 1};
}

// `vectors`: every tensor's memory begins at a multiple of 16 bytes.
Layout choose(int64_t hidden, int32_t input_type, int32_t output_type, bool vectors, const DeviceLimits& limits,
              bool backward) {
  const apex_norm_layout& asked = asked_layouts[backward];
  const bool doubles = input_type == APEX_F64, halves = input_type == output_type && bytes_of(input_type) == 2;
  const int64_t width = halves ? 8 : 4;
  if (doubles || !vectors || hidden % width != 0) return choose_long(hidden, vectors, doubles, limits);
  // The table: vectors a thread. Of halves three kernels a type, of others two.
  static constexpr int64_t of_kernel[NormOp::rows_kernels] = {2, 3, 4, 2, 3, 4, 4, 8, 4, 8};
  const int first = input_type != output_type ? 8 : input_type == APEX_BF16 ? 0 : input_type == APEX_F16 ? 3 : 6;
  const int last = first + (halves ? 3 : 2);
  // As few elements past the row's end as can be, then as many threads.
  Layout best{};
  const auto consider = [&](int i, int64_t threads, int64_t most, bool warp_rows) {
    const int64_t vectors_a_thread = of_kernel[i], all = threads * vectors_a_thread;
    if (threads > most || (asked.vectors && asked.vectors != vectors_a_thread)) return;
    const int64_t best_all = best.threads * best.vectors;
    if (best.threads && all >= best_all) return;
    best = {i, true, warp_rows, threads, width, vectors_a_thread};
  };
  if (asked.row_teams != 2)
    for (int i = first; i < last; ++i)
      if (ceil_divide(hidden, width * of_kernel[i]) <= limits.warp_size)
        consider(i, limits.warp_size, limits.warp_size, true);
  if (best.threads) {
    best.threads = asked.threads ? asked.threads : 256;
    return best;
  }
  if (asked.row_teams != 1)
    for (const int64_t most : {int64_t(256), int64_t(gpu::norm_threads)}) {
      for (int i = first; i < last; ++i)
        consider(i, whole_warps(ceil_divide(hidden, width * of_kernel[i]), limits), most, false);
      if (best.threads) return best;
    }
  return choose_long(hidden, vectors, false, limits);
}

// Blocks that stay. No blocks: a row does not fit in shared memory.
struct Residence { int64_t blocks, stages, constant_bytes, shared; };

// How many of those blocks a multiprocessor holds, at most `wanted`.
int32_t limit_by_driver(const apex_place* place, apex_kernel& kernel, std::atomic<uint64_t>& known, uint32_t threads,
                        int64_t shared, int64_t* wanted) {
  const uint64_t asked =
      uint64_t(place->platform) << 56 | uint64_t(place->device) << 48 | uint64_t(threads) << 32 | uint64_t(shared) << 8;
  uint64_t answer = known.load(std::memory_order_relaxed);
  if (answer >> 8 != asked >> 8) {
    int32_t blocks = 0;
    if (const int32_t status = blocks_at_once(*place, &kernel, threads, uint32_t(shared), &blocks)) return status;
    answer = asked | uint64_t(std::clamp(blocks, 0, 255));
    known.store(answer, std::memory_order_relaxed);
  }
  if (answer & 255) *wanted = std::min<int64_t>(*wanted, answer & 255);
  return APEX_OK;
}

// `constants`: tensors of one row's length that are kept. `threads_at_once`: of a multiprocessor.
int32_t reside(const apex_place* place, const DeviceLimits& limits, apex_kernel& kernel, std::atomic<uint64_t>& known,
               const Layout& layout, int64_t rows, int64_t tensors, int64_t constants, int64_t least_shared,
               int64_t threads_at_once, const apex_norm_layout& asked, Residence* found) {
  // On AMD rows and weights are in registers.
  const bool staged = place->platform != APEX_HIP;
  const int64_t team = layout.warp_rows ? limits.block_multiple : layout.threads;
  const int64_t constant_bytes = staged ? constants * team * layout.vectors * layout.width * 4 : 0;
  const int64_t stage = layout.threads * layout.vectors * tensors * shared_vector;
  const int64_t most_stages = asked.stages ? asked.stages : 3;
  *found = {};
  int64_t at_once = asked.blocks ? asked.blocks : std::max<int64_t>(1, threads_at_once / layout.threads);
  for (; at_once; --at_once) {
    const int64_t budget = (limits.shared_bytes + shared_beside) / at_once - shared_beside;
    const int64_t stages = staged ? std::min(most_stages, (budget - constant_bytes) / stage) : 1;
    if (budget < least_shared || stages < (at_once > 1 && staged ? std::min<int64_t>(2, most_stages) : 1)) continue;
    const int64_t shared = std::max(constant_bytes + (staged ? stages * stage : 0), least_shared);
    if (const int32_t status = limit_by_driver(place, kernel, known, uint32_t(layout.threads), shared, &at_once))
      return status;
    const int64_t teams = layout.warp_rows ? layout.threads / limits.warp_size : 1;
    *found = {std::min<int64_t>(limits.multiprocessors * at_once, ceil_divide(rows, teams)), stages, constant_bytes,
              shared};
    return APEX_OK;
  }
  return APEX_OK;
}

bool asks(const apex_norm_layout& asked) {
  return asked.vectors || asked.row_teams || asked.threads || asked.blocks || asked.stages;
}

// The `teams` kernels that take the rows, or null, and the shared memory of their block: where it fits a
// multiprocessor, and every team of all of them has a row. Who asks for a layout means the `rows` kernels.
// `constant_bytes`: of what is kept for each column; `tensors`: whose rows are on their way.
NormTeams* find_teams(NormTeams (&shapes)[NormOp::most_teams], const apex_place* place, const DeviceLimits& limits,
                      int64_t rows, int64_t hidden, int32_t input_type, int32_t output_type,
                      const apex_norm_layout& asked, int64_t constant_bytes, int64_t tensors, int64_t* shared) {
  if (place->platform != APEX_CUDA || input_type != output_type || bytes_of(input_type) != 2) return nullptr;
  if (asks(asked)) return nullptr;
  for (NormTeams& t : shapes) {
    *shared = hidden * (constant_bytes + 2 * tensors * t.teams * t.stages);
    if (t.hidden == hidden && rows >= limits.multiprocessors * t.teams &&
        *shared + shared_beside <= limits.shared_bytes)
      return &t;
  }
  return nullptr;
}

template <class Arguments>
int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads, int64_t shared,
               const Arguments& a, const gpu::Fp8Norm* fp8 = nullptr) {
  void* parameters[] = {const_cast<Arguments*>(&a), const_cast<gpu::Fp8Norm*>(fp8)};
  return apex_launch(place, &kernel, {uint32_t(std::min(blocks, most_threads / threads)), 1, 1}, {threads, 1, 1},
                     uint32_t(shared), parameters);
}

// The `few` kernels, where all blocks, a row each, are at work at once. Who asks for a layout means the `rows` kernels.
struct Few {
  int kernel;  // index in the op's table; -1: none takes these rows
  int64_t width, threads;
};
Few find_few(const DeviceLimits& limits, int64_t rows, int64_t hidden, int32_t input_type, int32_t output_type,
             bool vectors, const apex_norm_layout& asked) {
  constexpr int64_t threads_at_once = 1024;  // of a multiprocessor
  const bool halves = input_type == output_type && bytes_of(input_type) == 2;
  const int64_t width = halves ? 8 : 4, threads = whole_warps(ceil_divide(hidden, width), limits);
  if (asks(asked) || !vectors || input_type == APEX_F64 || hidden % width != 0 || threads > gpu::norm_threads ||
      rows * threads > limits.multiprocessors * threads_at_once)
    return {-1, 0, 0};
  return {input_type != output_type ? 3 : input_type == APEX_BF16 ? 0 : input_type == APEX_F16 ? 1 : 2, width, threads};
}

// The `held` kernel that takes the rows, or -1: rows that no warp has for itself, of halves with weights of their type,
// to a format that it knows. Who asks for a layout means the `rows` kernels.
int find_held(const NormOp& op, const apex_place* place, const Layout& layout, const gpu::NormForward& a,
              const gpu::Fp8Norm* fp8) {
  const bool has_weights = a.weight || a.bias;
  if (!fp8 || !op.forward_held[0].name || place->platform == APEX_HIP) return -1;
  if (!layout.in_registers || layout.warp_rows || layout.width != 8) return -1;
  if (!gpu::is_held_format(fp8->format) || (has_weights && a.weight_type != a.input_type)) return -1;
  if (asks(asked_layouts[0]) || a.hidden > gpu::norm_threads * gpu::norm_held_vectors * layout.width) return -1;
  return a.input_type == APEX_F16;
}
int32_t launch_held(NormOp& op, int kernel, const apex_place* place, const DeviceLimits& limits,
                    const gpu::NormForward& a, const gpu::Fp8Norm* fp8) {
  const int64_t threads = whole_warps(ceil_divide(a.hidden, int64_t{8} * gpu::norm_held_vectors), limits);
  int64_t at_once = std::max<int64_t>(1, 2048 / threads);
  if (const int32_t status =
          limit_by_driver(place, op.forward_held[kernel], op.held_fits[kernel], uint32_t(threads), 0, &at_once))
    return status;
  return launch(place, op.forward_held[kernel], std::min<int64_t>(a.rows, limits.multiprocessors * at_once),
                uint32_t(threads), 0, a, fp8);
}

// Where a backward's kernel is in the op's table. All but `longer` sum the weights' gradients up too.
enum class NormKernels { longer, rows, teams, few };
struct NormPlan {
  int32_t kernel;
  NormKernels of;
  uint32_t threads;
  int64_t blocks, shared;
};

// Of few rows the weights' gradients too, by further blocks. False: there are too many rows for that.
bool plan_few(const DeviceLimits& limits, bool vectors, gpu::NormBackward& a, NormPlan* plan) {
  constexpr int64_t most_rows = 512, most_elements = int64_t{1} << 20, least_threads = 256;
  const Few few = find_few(limits, a.rows, a.hidden, a.input_type, a.output_type, vectors, asked_layouts[1]);
  const bool sums = a.grad_weight;
  if (few.kernel < 0 || a.from_output || a.grad_sum || a.rows == 0) return false;
  if (sums && (a.rows > most_rows || a.rows * a.hidden > most_elements)) return false;
  const int64_t threads = sums ? std::max(few.threads, least_threads) : few.threads;
  *plan = {few.kernel, NormKernels::few, uint32_t(threads), a.rows, 0};
  a.row_blocks = int32_t(a.rows);
  if (!sums) return true;
  plan->blocks += ceil_divide(a.hidden, int64_t(gpu::norm_few_columns));
  return true;
}

int32_t plan_backward(NormOp& op, const apex_place* place, gpu::NormBackward& a, NormPlan* plan) {
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const bool vectors = aligned({a.grad_output, a.saved, a.grad_sum, a.weight, a.bias, a.grad_input});
  const apex_norm_layout asked = asked_layouts[1];
  if (plan_few(limits, vectors, a, plan)) return APEX_OK;
  if (vectors && !a.from_output && !a.grad_sum) {
    int64_t shared;
    if (NormTeams* t = find_teams(op.backward_teams, place, limits, a.rows, a.hidden, a.input_type, a.output_type,
                                  asked, 4, 2, &shared)) {
      a.parts = limits.multiprocessors;
      *plan = {int32_t(t - op.backward_teams), NormKernels::teams, uint32_t(t->threads), a.parts, shared};
      return APEX_OK;
    }
  }
  Layout layout = choose(a.hidden, a.input_type, a.output_type, vectors, limits, true);
  if (layout.in_registers) {
    Residence r;
    const int64_t tensors = a.grad_sum ? 3 : 2, constants = op.centered && a.from_output ? 2 : 1;
    const int64_t sums =
        layout.warp_rows ? layout.threads * layout.vectors * layout.width * 4 : 0;  // of one gradient, a warp each
    apex_kernel& kernel = (a.from_output ? op.backward_of_output_rows : op.backward_rows)[layout.kernel];
    auto& known = (a.from_output ? op.backward_of_output_fits : op.backward_fits)[layout.kernel];
    if (const int32_t status =
            reside(place, limits, kernel, known, layout, a.rows, tensors, constants, sums, 512, asked, &r))
      return status;
    if (r.blocks || a.rows == 0) {
      a.warp_rows = layout.warp_rows;
      a.stages = int32_t(r.stages);
      a.constant_bytes = int32_t(r.constant_bytes);
      a.parts = r.blocks;
      *plan = {layout.kernel, NormKernels::rows, uint32_t(layout.threads), r.blocks, r.shared};
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
  *plan = {layout.kernel, NormKernels::longer, uint32_t(layout.threads), a.rows, 0};
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

int32_t run_norm_forward(NormOp& op, const apex_place* place, gpu::NormForward a, const gpu::Fp8Norm* fp8) {
  int32_t variant;
  if (const int32_t status = check(op, a.input_type, a.output_type, a.weight_type, a.weight)) return status;
  if (const int32_t status = choose_variant(*place, op.unit, &variant)) return status;
  if (a.rows == 0 || a.hidden == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    norm_forward_cpu(op.centered, a, fp8);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const bool vectors = aligned({a.input, a.residual, a.sum, a.weight, a.bias, a.output});
  const apex_norm_layout asked = asked_layouts[0];
  const Few few = find_few(limits, a.rows, a.hidden, a.input_type, a.output_type, vectors, asked);
  if (few.kernel >= 0 && !a.residual && !fp8)
    return launch(place, op.forward_few[few.kernel], a.rows, uint32_t(few.threads), 0, a);
  if (vectors && !a.residual && a.weight_type == a.input_type) {
    int64_t shared;
    if (NormTeams* t = find_teams(op.forward_teams, place, limits, a.rows, a.hidden, a.input_type, a.output_type, asked,
                                  2 * 2, 1, &shared))
      return launch(place, t->kernels[a.input_type == APEX_F16], limits.multiprocessors, uint32_t(t->threads), shared,
                    a);
  }
  Layout layout = choose(a.hidden, a.input_type, a.output_type, vectors, limits, false);
  if (const int held = find_held(op, place, layout, a, fp8); held >= 0)
    return launch_held(op, held, place, limits, a, fp8);
  if (layout.in_registers) {
    Residence r;
    apex_kernel& kernel = op.forward_rows[layout.kernel];
    if (const int32_t status = reside(place, limits, kernel, op.forward_fits[layout.kernel], layout, a.rows,
                                      a.residual ? 2 : 1, op.centered ? 2 : 1, 0, 1024, asked, &r))
      return status;
    if (r.blocks) {
      a.warp_rows = layout.warp_rows;
      a.stages = int32_t(r.stages);
      a.constant_bytes = int32_t(r.constant_bytes);
      return launch(place, kernel, r.blocks, uint32_t(layout.threads), r.shared, a, fp8);
    }
    layout = choose_long(a.hidden, vectors, false, limits);
  }
  return launch(place, op.forward_long[layout.kernel], a.rows, uint32_t(layout.threads), 0, a, fp8);
}

int32_t run_norm_backward(NormOp& op, const apex_place* place, gpu::NormBackward a, const apex_workspace* workspace) {
  if (const int32_t status = check(op, a.input_type, a.output_type, a.weight_type, a.weight)) return status;
  int32_t variant;
  if (const int32_t status = choose_variant(*place, op.unit, &variant)) return status;
  if (a.hidden == 0) return APEX_OK;
  NormPlan plan{};
  if (variant == APEX_VARIANT_CPU)  // as many parts whatever the number of threads: the sums stay the same
    a.parts = a.rows == 0 ? 0 : std::clamp<int64_t>(a.rows / 16, 1, 64);
  else if (const int32_t status = plan_backward(op, place, a, &plan)) return status;
  const bool parted = a.grad_weight && plan.of != NormKernels::few;
  const int64_t sums = parted ? (op.centered ? 2 : 1) * a.parts * gpu::norm_partials_pitch(a.hidden) : 0;
  if (const int32_t status = take_workspace(workspace, sums * sum_bytes(a.input_type), &a.partials)) return status;
  if (variant == APEX_VARIANT_CPU) {
    norm_backward_cpu(op.centered, a);
    return APEX_OK;
  }
  int32_t status = APEX_OK;
  const bool doubles = a.input_type == APEX_F64;
  if (a.rows > 0) {
    apex_kernel& kernel = plan.of == NormKernels::few ? op.backward_few[plan.kernel]
                          : plan.of == NormKernels::teams
                              ? op.backward_teams[plan.kernel].kernels[a.input_type == APEX_F16]
                          : plan.of == NormKernels::longer ? op.backward_long[plan.kernel]
                          : a.from_output                  ? op.backward_of_output_rows[plan.kernel]
                                                           : op.backward_rows[plan.kernel];
    status = launch(place, kernel, plan.blocks, plan.threads, plan.shared, a);
    if (status == APEX_OK && a.grad_weight && plan.of == NormKernels::longer)
      status = launch(place, op.columns[doubles], a.column_blocks * a.parts, gpu::norm_threads, 0, a);
  }
  if (status == APEX_OK && parted)
    status = launch(place, op.finish[doubles], ceil_divide(a.hidden, gpu::norm_sum_columns), gpu::norm_threads, 0, a);
  return status;
}
}  // namespace apex

extern "C" void apex_set_norm_layout(int32_t backward, const apex_norm_layout* layout) {
  apex::asked_layouts[backward != 0] = layout ? *layout : apex_norm_layout{};
}
