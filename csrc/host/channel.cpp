#include "channel.h"

#include <initializer_list>

#include "device_limits.h"
#include "dtypes.h"
#include "status.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr int64_t most = 0x7fffffff;
int64_t width_of(int32_t type) { return 16 / bytes_of(type); }

uint64_t bits(const void* p) { return reinterpret_cast<uint64_t>(p); }
bool aligned(std::initializer_list<const void*> pointers) {
  uint64_t all = 0;
  for (const void* p : pointers) all |= bits(p);
  return all % 16 == 0;
}
int64_t power_of_two(int64_t least) {
  int64_t n = 1;
  while (n < least) n *= 2;
  return n;
}

int32_t check(const char* unit, int32_t input, int32_t weight) {
  for (const int32_t type : {input, weight})
    if (type < APEX_F32 || type > APEX_F64)
      return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", unit);
  if ((input == APEX_F64) != (weight == APEX_F64))
    return fail(APEX_ERROR_ARGUMENT, "%s: float64 goes with float64 alone: input, weight and bias alike", unit);
  return APEX_OK;
}

// Threads that a multiprocessor has registers for, at least.
constexpr int64_t resident = 2 * gpu::channel_threads;

// All blocks run at once: none waits for another's end, and memory is kept busy until all end.
void plan_channels_first(gpu::ChannelReduce& a, const DeviceLimits& limits) {
  const int64_t width = width_of(a.input_type), multiple = limits.block_multiple;
  a.exact = a.spatial % width == 0 && aligned({a.input, a.grad_output});
  a.segment_vectors = uint32_t(a.exact ? a.spatial / width : (a.spatial + 2 * width - 2) / width);
  a.same_alignment = (bits(a.input) - bits(a.grad_output)) % 16 == 0;
  const int64_t vectors = a.batch * a.segment_vectors;
  const int64_t of_channel = resident / ceil_divide(a.channels, limits.multiprocessors) / multiple * multiple;
  const int64_t useful = ceil_divide(ceil_divide(vectors, 4), multiple) * multiple;
  const int64_t threads = std::clamp<int64_t>(std::min(of_channel, useful), multiple, gpu::channel_threads);
  const int64_t parts = std::max<int64_t>(
      1, std::min<int64_t>(limits.multiprocessors * (resident / threads) / a.channels, vectors / (threads * 8)));
  a.part_vectors = uint32_t(ceil_divide(vectors, parts));
  a.parts = uint32_t(ceil_divide(vectors, a.part_vectors));
  const int64_t pitch = a.channels * a.spatial * bytes_of(a.input_type), vector = a.exact ? 16 : 0;
  a.step_vectors = uint32_t(threads % a.segment_vectors);
  a.step_bytes = threads / a.segment_vectors * pitch + a.step_vectors * vector;
  a.wrap_bytes = pitch - a.segment_vectors * vector;
  a.threads = uint32_t(threads);
  a.width = uint32_t(width);
}
// Columns of 128 bytes, which is what memory likes to move; of few channels 64, so that several blocks end the work.
void plan_channels_last(gpu::ChannelReduce& a, const DeviceLimits& limits) {
  const bool vectors = a.channels % width_of(a.input_type) == 0 && aligned({a.input, a.grad_output});
  const int64_t width = vectors ? width_of(a.input_type) : 1;
  const int64_t wide = ceil_divide(a.channels, width);
  a.width = uint32_t(width);
  a.columns = uint32_t(power_of_two(std::min<int64_t>(wide, width == 1 ? 64 : wide <= 16 ? 4 : 8)));
  a.column_blocks = uint32_t(ceil_divide(wide, a.columns));
  const int64_t least = std::max<int64_t>(limits.block_multiple, a.columns * width);
  const int64_t threads =
      std::clamp<int64_t>(power_of_two(a.columns * std::min<int64_t>(a.batch, most)), least, gpu::channel_threads);
  const int64_t lanes = threads / a.columns, at_once = limits.multiprocessors * (resident / threads);
  const int64_t wanted = std::min<int64_t>(at_once / a.column_blocks, a.batch / (lanes * 4));
  const int64_t parts = std::max<int64_t>(1, width == 1 ? wanted : std::min(wanted, lanes + lanes / 2));
  a.part_rows = ceil_divide(a.batch, parts);
  a.step_bytes = lanes * a.channels * bytes_of(a.input_type);
  a.parts = uint32_t(ceil_divide(a.batch, a.part_rows));
  a.threads = uint32_t(threads);
}

template <class Arguments>
int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads, const Arguments& a) {
  void* parameters[] = {const_cast<Arguments*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(blocks), 1, 1}, {threads, 1, 1}, 0, parameters);
}
}  // namespace

int32_t run_channel_reduce(ChannelReduceOp& op, const apex_place* place, gpu::ChannelReduce a,
                           const apex_workspace* workspace) {
  if (const int32_t status = check(op.unit, a.input_type, a.weight_type)) return status;
  int32_t variant;
  if (const int32_t status = choose_variant(*place, op.unit, &variant)) return status;
  a.parts = 1;
  if (a.batch == 0 || a.channels == 0 || a.spatial == 0) return APEX_OK;
  const bool cpu = variant == APEX_VARIANT_CPU;
  if (cpu) {  // as many parts whatever the number of threads: the sums stay the same
    if (a.channels_last) a.parts = uint32_t(std::clamp<int64_t>(a.batch / 64, 1, 64));
  } else {
    // Kernels count vectors, rows of a part and blocks in 32 bits: 10^10 elements a channel.
    if (a.batch / 64 > most || a.channels > most - 64 || a.spatial > most - 64 ||
        a.batch * ceil_divide(a.spatial, width_of(a.input_type)) > most / 2)
      return APEX_USE_REFERENCE;
    DeviceLimits limits;
    if (const int32_t status = device_limits(*place, &limits)) return status;
    (a.channels_last ? plan_channels_last : plan_channels_first)(a, limits);
  }
  const int64_t sums = a.parts > 1 || cpu ? int64_t(a.parts) * 3 * a.channels : 0;  // the CPU merges one part, too
  const int64_t counters = a.parts <= 1 || cpu ? 0 : a.channels_last ? int64_t(a.column_blocks) : a.channels;
  if (const int32_t status =
          take_workspace(*place, workspace, sums * sum_bytes(a.input_type), counters, &a.partials, &a.counters))
    return status;
  if (cpu) {
    op.cpu(a);
    return APEX_OK;
  }
  if (!a.channels_last) return launch(place, op.first[a.input_type], a.parts * a.channels, a.threads, a);
  auto& kernels = a.width == width_of(a.input_type) ? op.last : op.last1;
  return launch(place, kernels[a.input_type], int64_t(a.parts) * a.column_blocks, a.threads, a);
}

int32_t run_channel_apply(ChannelApplyOp& op, const apex_place* place, gpu::ChannelApply a) {
  if (const int32_t status = check(op.unit, a.input_type, a.weight_type)) return status;
  int32_t variant;
  if (const int32_t status = choose_variant(*place, op.unit, &variant)) return status;
  if (a.batch == 0 || a.channels == 0 || a.spatial == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    op.cpu(a);
    return APEX_OK;
  }
  if (a.channels > most - 64 || a.batch / 64 > most) return APEX_USE_REFERENCE;
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  // All at once, as above, unless the table of channels is too small for that.
  const int64_t width = op.width ? op.width : width_of(a.input_type), threads = gpu::apply_threads,
                blocks = limits.multiprocessors * 3;
  a.vectors = aligned({a.input, a.grad_output, a.z, a.output, a.grad_z});
  if (a.channels_last && a.vectors && a.channels % width == 0) {
    const int64_t wide = a.channels / width;
    a.columns = uint32_t(power_of_two(std::min<int64_t>(wide, 32)));
    a.column_blocks = uint32_t(ceil_divide(wide, a.columns));
    const int64_t lanes = threads / a.columns, runs = std::max<int64_t>(1, blocks / a.column_blocks);
    a.part_rows = std::max(lanes * 4, ceil_divide(a.batch, runs));
    return launch(place, op.last[a.input_type], ceil_divide(a.batch, a.part_rows) * a.column_blocks, uint32_t(threads),
                  a);
  }
  const int64_t vectors = ceil_divide(a.batch * a.channels * a.spatial, width), line = 8;
  int64_t part = std::max(threads * 2, ceil_divide(ceil_divide(vectors, blocks), line) * line);
  // A run begins and ends within a channel: it meets two more than it holds.
  if (a.channels > gpu::table_channels) part = std::min<int64_t>(part, (gpu::table_channels - 2) * a.spatial / width);
  const int64_t grid = ceil_divide(vectors, part), step = threads * width;
  if (part > most || grid * threads > most_threads) return APEX_USE_REFERENCE;
  a.part_vectors = uint32_t(part);
  a.step_spatial = step % a.spatial;
  a.step_channels = uint32_t(step / a.spatial % a.channels);
  return launch(place, op.any[a.input_type], grid, uint32_t(threads), a);
}
}  // namespace apex
