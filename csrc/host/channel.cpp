#include "channel.h"

#include <initializer_list>

#include "device_limits.h"
#include "status.h"

namespace apex {
namespace {
constexpr int64_t most = 0x7fffffff;
int64_t bytes_of(int32_t type) { return type == APEX_F64 ? 8 : type == APEX_F32 ? 4 : 2; }
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

// A few blocks more than the device holds at once, each with enough to do that its own end costs little.
void plan_channels_first(gpu::ChannelReduce& a, const DeviceLimits& limits) {
  const int64_t width = width_of(a.input_type);
  const bool exact = a.spatial % width == 0 && bits(a.input) % 16 == 0;
  a.segment_vectors = uint32_t(exact ? a.spatial / width : (a.spatial + 2 * width - 2) / width);
  a.same_alignment = (bits(a.input) - bits(a.grad_output)) % 16 == 0;
  const int64_t vectors = a.batch * a.segment_vectors;
  const int64_t threads = std::clamp<int64_t>(power_of_two(ceil_divide(vectors, 2)), limits.block_multiple, gpu::channel_first_threads);
  const int64_t wanted = ceil_divide(limits.multiprocessors * 16, a.channels);
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(wanted, vectors / (threads * 8)));
  a.part_vectors = uint32_t(ceil_divide(vectors, parts));
  a.parts = uint32_t(ceil_divide(vectors, a.part_vectors));
  a.step_segments = uint32_t(threads / a.segment_vectors);
  a.step_vectors = uint32_t(threads % a.segment_vectors);
  a.threads = uint32_t(threads);
  a.width = uint32_t(width);
}
// Columns of 128 bytes, which is what memory likes to move.
void plan_channels_last(gpu::ChannelReduce& a, const DeviceLimits& limits) {
  const bool vectors = a.channels % width_of(a.input_type) == 0 && aligned({a.input, a.grad_output});
  const int64_t width = vectors ? width_of(a.input_type) : 1;
  const int64_t wide = ceil_divide(a.channels, width);
  a.width = uint32_t(width);
  a.columns = uint32_t(power_of_two(std::min<int64_t>(wide, width == 1 ? 64 : 8)));
  a.column_blocks = uint32_t(ceil_divide(wide, a.columns));
  const int64_t threads = std::clamp<int64_t>(power_of_two(a.columns * std::min<int64_t>(a.batch, most)), limits.block_multiple, gpu::channel_threads);
  const int64_t lanes = threads / a.columns, wanted = ceil_divide(limits.multiprocessors * 4, a.column_blocks);
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(wanted, a.batch / (lanes * 8)));
  a.part_rows = ceil_divide(a.batch, parts);
  a.parts = uint32_t(ceil_divide(a.batch, a.part_rows));
  a.threads = uint32_t(threads);
}

template <class Arguments>
int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads, const Arguments& a) {
  void* parameters[] = {const_cast<Arguments*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(blocks), 1, 1}, {threads, 1, 1}, 0, parameters);
}
}  // namespace

int32_t prepare_channel_reduce(const ChannelReduceOp& op, const apex_place* place, gpu::ChannelReduce* a) {
  if (const int32_t status = check(op.unit, a->input_type, a->weight_type)) return status;
  const int32_t variant = apex_resolve(place->platform, place->device, op.unit);
  if (variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;
  if (variant == APEX_VARIANT_REFERENCE) return APEX_USE_REFERENCE;
  a->parts = 1;
  if (a->batch == 0 || a->channels == 0 || a->spatial == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {  // as many parts whatever the number of threads: the sums stay the same
    if (a->channels_last) a->parts = uint32_t(std::clamp<int64_t>(a->batch / 64, 1, 64));
    return APEX_OK;
  }
  // Kernels count vectors, rows of a part and blocks in 32 bits: 10^10 elements a channel.
  if (a->batch / 64 > most || a->channels > most || a->spatial > most || a->batch * ceil_divide(a->spatial, width_of(a->input_type)) > most / 2)
    return APEX_USE_REFERENCE;
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  (a->channels_last ? plan_channels_last : plan_channels_first)(*a, limits);
  return APEX_OK;
}

int32_t run_channel_reduce(ChannelReduceOp& op, const apex_place* place, const gpu::ChannelReduce& a) {
  const int32_t variant = apex_resolve(place->platform, place->device, op.unit);
  if (variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;
  if (variant == APEX_VARIANT_REFERENCE) return APEX_USE_REFERENCE;
  if (a.batch == 0 || a.channels == 0 || a.spatial == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    op.cpu(a);
    return APEX_OK;
  }
  if (!a.channels_last) return launch(place, op.first[a.input_type], a.parts * a.channels, a.threads, a);
  auto& kernels = a.width == width_of(a.input_type) ? op.last : op.last1;
  return launch(place, kernels[a.input_type], int64_t(a.parts) * a.column_blocks, a.threads, a);
}

int32_t run_channel_apply(ChannelApplyOp& op, const apex_place* place, gpu::ChannelApply a) {
  if (const int32_t status = check(op.unit, a.input_type, a.weight_type)) return status;
  const int32_t variant = apex_resolve(place->platform, place->device, op.unit);
  if (variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;
  if (variant == APEX_VARIANT_REFERENCE) return APEX_USE_REFERENCE;
  if (a.batch == 0 || a.channels == 0 || a.spatial == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    op.cpu(a);
    return APEX_OK;
  }
  if (a.channels > most) return APEX_USE_REFERENCE;
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const int64_t width = op.width ? op.width : width_of(a.input_type), blocks = limits.multiprocessors * 16;
  a.vectors = aligned({a.input, a.grad_output, a.z, a.output, a.grad_z});
  if (a.channels_last && a.vectors && a.channels % width == 0) {
    const int64_t wide = a.channels / width, threads = gpu::apply_threads;
    a.columns = uint32_t(power_of_two(std::min<int64_t>(wide, 32)));
    a.column_blocks = uint32_t(ceil_divide(wide, a.columns));
    const int64_t lanes = threads / a.columns, runs = ceil_divide(blocks, a.column_blocks);
    a.part_rows = std::max(lanes * 8, ceil_divide(a.batch, runs));
    return launch(place, op.last[a.input_type], ceil_divide(a.batch, a.part_rows) * a.column_blocks, uint32_t(threads), a);
  }
  const int64_t threads = gpu::apply_threads, vectors = ceil_divide(a.batch * a.channels * a.spatial, width);
  const int64_t grid = std::min(blocks, ceil_divide(vectors, threads)), step = grid * threads * width;
  a.step_spatial = step % a.spatial;
  a.step_channels = uint32_t(step / a.spatial % a.channels);
  return launch(place, op.any[a.input_type], grid, uint32_t(threads), a);
}
}  // namespace apex
