// Rotary positional embedding: launches. csrc/device/rope.h says what is computed.
#include "rope.h"

#include <algorithm>

#include "device_limits.h"
#include "dtypes.h"
#include "few_rows.h"
#include "status.h"

namespace apex {
namespace {
constexpr int64_t table_bytes = 16384;  // of shared memory, at most
constexpr int64_t most = 0x7fffffff;

#define APEX_ROPE_KERNEL(name) {"rope", "rope_" #name, 0, 1}
apex_kernel bf16x8 = APEX_ROPE_KERNEL(bf16x8), f16x8 = APEX_ROPE_KERNEL(f16x8), f32x4 = APEX_ROPE_KERNEL(f32x4),
            any4 = APEX_ROPE_KERNEL(any4), any1 = APEX_ROPE_KERNEL(any1), f64 = APEX_ROPE_KERNEL(f64),
            even_bf16x8 = APEX_ROPE_KERNEL(even_bf16x8), even_f16x8 = APEX_ROPE_KERNEL(even_f16x8),
            even_f32x4 = APEX_ROPE_KERNEL(even_f32x4), single_bf16x8 = APEX_ROPE_KERNEL(single_bf16x8),
            single_f16x8 = APEX_ROPE_KERNEL(single_f16x8), single_f32x4 = APEX_ROPE_KERNEL(single_f32x4),
            alone[3] = {APEX_ROPE_KERNEL(alone_f32), APEX_ROPE_KERNEL(alone_f16), APEX_ROPE_KERNEL(alone_bf16)};

// Whether every head splits into vectors of `width`, each at a multiple of its own size.
bool takes_vectors(const gpu::Rope& a, int64_t width) {
  if (a.in_element != 1 && a.dim > 1) return false;
  if (a.rotary / 2 % width || (a.dim - a.groups * a.rotary) % width) return false;
  const uintptr_t bytes = width * bytes_of(a.type);
  if ((reinterpret_cast<uintptr_t>(a.input) | reinterpret_cast<uintptr_t>(a.output)) % bytes) return false;
  const int64_t extents[] = {a.height, a.width, a.batch, a.heads};
  const int64_t in[] = {a.in_y, a.in_x, a.in_batch, a.in_head}, out[] = {a.out_y, a.out_x, a.out_batch, a.out_head};
  for (int i = 0; i < 4; ++i)
    if (extents[i] > 1 && (in[i] % width || out[i] % width)) return false;
  return true;
}

// Makes the heads of a position one row of a constant stride, if they are; each then has as many vectors in both
// halves.
bool take_even_rows(gpu::Rope& a, int64_t width) {
  if (a.groups != 1 || a.height != 1 || (a.dim - a.rotary) / width % 2) return false;
  if (a.batch > 1 && a.heads > 1 && (a.in_batch != a.heads * a.in_head || a.out_batch != a.heads * a.out_head))
    return false;
  if (a.heads == 1) a.in_head = a.in_batch, a.out_head = a.out_batch;
  a.heads *= a.batch, a.batch = 1;
  return true;
}

// Of so few heads that threads may each make the sines that they need. False: there are more, or they lie otherwise.
bool take_few(gpu::Rope& a, gpu::RopeAlone& few) {
  constexpr int64_t most_elements = int64_t{1} << 18;
  if (a.type == APEX_F64 || a.angle_type != APEX_F32 || a.sin || a.cu_seqlens || a.in_element != 1) return false;
  const int64_t elements = a.width * a.batch * a.heads * a.dim, lanes = a.dim / 2;
  if (elements > most_elements || a.batch * a.heads * a.dim > 4096 || !take_even_rows(a, 1)) return false;
  if (a.width == 1) a.in_x = a.out_x = a.angle_stride = 0;  // a stride of nothing may be any number
  if (a.heads == 1) a.in_head = a.out_head = 0;
  const auto reaches = [&](int64_t place, int64_t head) { return a.width * place + a.heads * head + a.dim; };
  if (std::max({reaches(a.in_x, a.in_head), reaches(a.out_x, a.out_head),
                a.width * a.angle_stride + a.dim * a.angle_step}) > most)
    return false;
  few = {a.input,
         a.output,
         reinterpret_cast<const float*>(a.cos),
         uint32_t(elements / 2),
         uint32_t(lanes),
         share_of(lanes),
         uint32_t(a.heads),
         share_of(a.heads),
         uint32_t(a.in_x),
         uint32_t(a.in_head),
         uint32_t(a.out_x),
         uint32_t(a.out_head),
         uint32_t(a.angle_stride),
         uint32_t(a.angle_step),
         uint32_t(a.rotary / 2),
         uint32_t((a.dim - a.rotary) / 2),
         a.transposed};
  return true;
}

int32_t launch(const apex_place* place, gpu::Rope a) {
  if (gpu::RopeAlone few; take_few(a, few)) {
    void* parameters[] = {&few};
    const uint32_t blocks = uint32_t(ceil_divide(few.items, gpu::rope_threads));
    return apex_launch(place, &alone[a.type], {blocks, 1, 1}, {gpu::rope_threads, 1, 1}, 0, parameters);
  }
  const int64_t turned = int64_t(a.groups) * a.rotary, row_table = 2 * turned * sum_bytes(a.type);
  a.table = row_table <= table_bytes;
  int64_t width = 1;
  apex_kernel *kernel = a.type == APEX_F64 ? &f64 : &any1, *even = nullptr, *single = nullptr;
  if (a.type != APEX_F64 && a.table) {
    if (a.type != APEX_F32 && takes_vectors(a, 8)) {
      width = 8;
      kernel = a.type == APEX_BF16 ? &bf16x8 : &f16x8;
      even = a.type == APEX_BF16 ? &even_bf16x8 : &even_f16x8;
      single = a.type == APEX_BF16 ? &single_bf16x8 : &single_f16x8;
    } else if (takes_vectors(a, 4)) {
      width = 4;
      kernel = a.type == APEX_F32 ? &f32x4 : &any4;
      even = a.type == APEX_F32 ? &even_f32x4 : nullptr;
      single = &single_f32x4;
    }
  }
  const int64_t lanes = a.groups * (a.rotary / 2 / width) + ((a.dim - turned) / width + 1) / 2;
  a.lane_threads = int32_t(std::min<int64_t>(lanes, gpu::rope_threads));
  const bool is_even = even && lanes <= gpu::rope_threads && take_even_rows(a, width);
  // A block takes several positions, or a part of one: twice what its threads can have in flight, as it makes the sines
  // and cosines but once, or less where too few blocks would be left. Of even rows: what they have in flight.
  const int64_t rows = a.batch * a.heads, at_once = gpu::rope_threads / a.lane_threads;
  a.step_positions = int32_t(at_once / rows);
  a.step_batches = int32_t(at_once % rows / a.heads);
  a.step_heads = int32_t(at_once % rows % a.heads);
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  int64_t wanted, positions, chunks, blocks, turns = is_even ? gpu::rope_even_heads : 2 * gpu::rope_in_flight;
  for (;; turns /= 2) {
    wanted = at_once * turns;
    positions =
        std::clamp<int64_t>(is_even ? at_once / ceil_divide(rows, turns) : wanted / rows, 1, gpu::rope_most_positions);
    if (a.table && row_table) positions = std::min(positions, std::max<int64_t>(1, table_bytes / row_table));
    chunks = positions > 1 ? 1 : ceil_divide(rows, wanted);
    blocks = ceil_divide(a.height * a.width, positions) * chunks;
    if (turns == 1 || blocks >= limits.multiprocessors * 8) break;
  }
  a.positions = int32_t(positions);
  if (blocks > most)
    return fail(APEX_ERROR_VALUE, "rope: a tensor of more than 2^31 blocks of %lld heads", (long long)wanted);
  a.chunks = uint32_t(chunks);
  a.chunk_rows = ceil_divide(rows, chunks);
  a.blocks = uint32_t(blocks);
  if (is_even) {
    kernel = turns == 1 ? single : even;
    a.step_heads = int32_t(at_once / positions);
  }
  void* parameters[] = {&a};
  return apex_launch(place, kernel, {a.blocks, 1, 1}, {gpu::rope_threads, 1, 1},
                     uint32_t(a.table ? positions * row_table : 0), parameters);
}

int32_t run(const apex_place* place, const gpu::Rope& a) {
  int32_t variant;
  if (const int32_t status = choose_variant(*place, "rope", &variant)) return status;
  if (a.height == 0 || a.width == 0 || a.batch == 0 || a.heads == 0 || a.dim == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    rope_cpu(a);
    return APEX_OK;
  }
  if (a.batch > most / a.heads || (a.height > 1 && a.height > most / a.width))
    return fail(APEX_ERROR_VALUE, "rope: batch times heads, and the places of an image, must each stay below 2^31");
  return launch(place, a);
}

// What a GPU answers with nan, because looking would make it wait, is refused where looking costs nothing.
int32_t check_sequences(const gpu::Rope& a) {
  if (!a.cu_seqlens) return APEX_OK;
  const int32_t *at = a.cu_seqlens, last = at[a.sequences];
  if (at[0] != 0 || last > a.width)
    return fail(APEX_ERROR_VALUE,
                "rope: cu_seqlens must begin at 0 and end within the input's %lld places, not go from %d to %d",
                (long long)a.width, at[0], last);
  for (int32_t k = 1; k <= a.sequences; ++k) {
    if (at[k - 1] > at[k])
      return fail(APEX_ERROR_VALUE, "rope: cu_seqlens falls from %d to %d at index %d", at[k - 1], at[k], k);
    if (at[k] - at[k - 1] > a.angle_rows)
      return fail(APEX_ERROR_VALUE, "rope: sequence %d has %d places but freqs only %lld", k - 1, at[k] - at[k - 1],
                  (long long)a.angle_rows);
  }
  return APEX_OK;
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_rope(const apex_place* place, const gpu::Rope* arguments) {
  if (place->platform == APEX_CPU)
    if (const int32_t status = apex::check_sequences(*arguments)) return status;
  return apex::run(place, *arguments);
}
