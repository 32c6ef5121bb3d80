#include "transducer_joint.h"

#include <algorithm>

#include "device_limits.h"
#include "driver.h"
#include "dtypes.h"
#include "status.h"
#include "values.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "transducer_joint";
// By apex_dtype; then those that take elements one by one: arithmetic in float, in double.
#define KERNELS(name)                                                                                                 \
  {                                                                                                                   \
      {unit, "transducer_joint_" name "_f32", 0, 1},          {unit, "transducer_joint_" name "_f16", 0, 1},          \
      {unit, "transducer_joint_" name "_bf16", 0, 1},         {unit, "transducer_joint_" name "_f64", 0, 1},          \
      {unit, "transducer_joint_" name "_elements_f32", 0, 1}, {unit, "transducer_joint_" name "_elements_f64", 0, 1}, \
  }
apex_kernel forward_kernels[2][6] = {KERNELS("forward"), KERNELS("dropout")};
apex_kernel backward_kernels[3][6] = {KERNELS("backward_none"), KERNELS("backward_relu"), KERNELS("backward_bits")};
// By mask: of little work.
apex_kernel apart_kernels[3][6] = {KERNELS("backward_none_apart"), KERNELS("backward_relu_apart"),
                                   KERNELS("backward_bits_apart")};
#undef KERNELS
// By mask; of halves, which a block holds all labels of.
apex_kernel held_kernels[3][2] = {
    {{unit, "transducer_joint_backward_none_held_f16", 0, 1}, {unit, "transducer_joint_backward_none_held_bf16", 0, 1}},
    {{unit, "transducer_joint_backward_relu_held_f16", 0, 1}, {unit, "transducer_joint_backward_relu_held_bf16", 0, 1}},
    {{unit, "transducer_joint_backward_bits_held_f16", 0, 1},
     {unit, "transducer_joint_backward_bits_held_bf16", 0, 1}}};

// By mask; of halves whose rows begin anywhere.
apex_kernel shifted_kernels[2][2] = {{{unit, "transducer_joint_backward_none_shifted_f16", 0, 1},
                                      {unit, "transducer_joint_backward_none_shifted_bf16", 0, 1}},
                                     {{unit, "transducer_joint_backward_relu_shifted_f16", 0, 1},
                                      {unit, "transducer_joint_backward_relu_shifted_bf16", 0, 1}}};
apex_kernel staged_kernels[2] = {{unit, "transducer_joint_forward_staged_f16", 0, 1},
                                 {unit, "transducer_joint_forward_staged_bf16", 0, 1}};

int64_t vector_width(int32_t type) { return type == APEX_F64 ? 2 : type == APEX_F32 ? 4 : 8; }
int kernel_of(int32_t type, bool vectors) { return vectors ? type : type == APEX_F64 ? 5 : 4; }

// Whether every row of all these tensors begins at a multiple of 16 bytes.
template <class... Tensors> bool rows_in_vectors(int64_t hidden, int64_t width, Tensors... tensors) {
  return hidden % width == 0 && ((reinterpret_cast<uintptr_t>(tensors) | ...) % 16) == 0;
}

// Halves whose rows are read or written in the vectors that they lie in. Of short rows threads would be idle.
bool is_of_halves(int64_t hidden, int32_t type) { return vector_width(type) == 8 && hidden >= 64; }
// Whether the forward's go through shared memory.
bool takes_staged(int64_t hidden, int32_t type) {
  return is_of_halves(hidden, type) && hidden <= gpu::joint_staged_most_columns * gpu::joint_forward_threads;
}
// Whether the backward's, read so, begin with a vector.
template <class... Tensors> bool takes_shifted(int64_t hidden, int32_t type, Tensors... tensors) {
  return is_of_halves(hidden, type) && ((reinterpret_cast<uintptr_t>(tensors) | ...) % 16) == 0;
}

template <class Arguments> int32_t check_items(const apex_place& place, const Arguments& a) {
  if (place.platform != APEX_CPU) return APEX_OK;
  const auto* const ends = reinterpret_cast<const int64_t*>(a.batch_offset);
  long long end = 0;
  for (long long b = 0; b < a.batch; ++b) {
    const long long t = integer_at(a.f_len, b, a.wide_lengths), u = integer_at(a.g_len, b, a.wide_lengths);
    if (t < 0 || t > a.frames)
      return fail(APEX_ERROR_VALUE, "%s: f_len[%lld] is %lld, but f has %lld frames", unit, b, t, (long long)a.frames);
    if (u < 0 || u > a.labels)
      return fail(APEX_ERROR_VALUE, "%s: g_len[%lld] is %lld, but g has %lld labels", unit, b, u, (long long)a.labels);
    if (!ends) continue;
    end += t * u;
    if (ends[b] != end)
      return fail(APEX_ERROR_VALUE, "%s: batch_offset[%lld] is %lld, but the sum of f_len * g_len up to it is %lld",
                  unit, b, (long long)ends[b], end);
    if (end > a.rows)
      return fail(APEX_ERROR_VALUE, "%s: packed_batch is %lld, less than the %lld rows of the items", unit,
                  (long long)a.rows, end);
  }
  return APEX_OK;
}

template <class Arguments> int32_t choose(const apex_place* place, const Arguments& a, int32_t* variant) {
  if (a.type < APEX_F32 || a.type > APEX_F64)
    return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", unit);
  if (a.frames > 0x3fffffff || a.labels > 0x3fffffff || a.hidden > 0xffffff)
    return fail(APEX_ERROR_VALUE,
                "%s: %lld frames, %lld labels, %lld columns: 2^30 - 1, 2^30 - 1 and 2^24 - 1 are the most", unit,
                (long long)a.frames, (long long)a.labels, (long long)a.hidden);
  if (const int32_t status = check_items(*place, a)) return status;
  return choose_variant(*place, unit, variant);
}

// Of 64 threads or fewer, those side by side on a row that leave the fewest of them idle at its end.
int32_t lanes_for(int64_t parts) {
  int32_t best = 64;
  for (int32_t lanes = 32; lanes >= 8; lanes /= 2)
    if (ceil_divide(parts, lanes) * lanes < ceil_divide(parts, best) * best) best = lanes;
  return best;
}

int mask_of(const gpu::TransducerJointBackward& a) { return a.mask ? 2 : a.f ? 1 : 0; }
bool backward_in_vectors(const gpu::TransducerJointBackward& a) {
  return rows_in_vectors(a.hidden, vector_width(a.type), a.grad_output, a.f, a.g, a.grad_f, a.grad_g);
}

// Little work, which takes as long as what waits one for another in it: the sums of each gradient apart.
bool takes_apart(const gpu::TransducerJointBackward& a) {
  constexpr int64_t most_rows = 64, most_bytes = 1 << 20;  // of a sum; that are read twice
  return a.frames <= most_rows && a.labels <= most_rows && a.rows * a.hidden * 16 / vector_width(a.type) <= most_bytes;
}
int32_t launch_apart(const apex_place* place, gpu::TransducerJointBackward& a, const DeviceLimits& limits) {
  const bool vectors = backward_in_vectors(a);
  const int64_t slabs = ceil_divide(a.hidden, 8 * (vectors ? vector_width(a.type) : 1)),
                warps = a.batch * (a.frames + a.labels) * slabs;
  const int64_t blocks = ceil_divide(warps, std::max<int64_t>(1, gpu::joint_apart_threads / limits.block_multiple));
  void* parameters[] = {&a};
  return apex_launch(place, &apart_kernels[mask_of(a)][kernel_of(a.type, vectors)],
                     {uint32_t(std::max<int64_t>(1, blocks)), 1, 1}, {gpu::joint_apart_threads, 1, 1}, 0, parameters);
}

struct Backward {
  apex_kernel* kernel;
  int32_t threads;
  int64_t slab, slabs;  // columns of a block; blocks on a row
  uint32_t row_bytes;   // of shared memory, for each frame of a block; where all labels are held at once, none
  uint32_t shared;      // beside that
  // What a block takes beside its frames, counted in these: reading its first ones, and where it shares the item's
  // frames, writing and reading float sums.
  int64_t start, sharing;
  int64_t streams;  // where all labels are held at once: frames that a block works on at once; else 0

  // What a block takes in all. Of those with streams it is counted in frames of a block that has five.
  int64_t cost(int64_t frames, bool shares) const {
    return (streams ? 5 * ceil_divide(frames, streams) : frames) + start + (shares ? sharing : 0);
  }
};
Backward backward_of(const apex_place* place, const gpu::TransducerJointBackward& a, const DeviceLimits& limits) {
  const int mask = mask_of(a);
  const int64_t width = vector_width(a.type);
  const bool vectors = backward_in_vectors(a), halves = width == 8;
  // Cards from Hopper on compare halves packed; those before, whose blocks have less memory, lack the registers.
  constexpr int64_t hopper_shared_bytes = 227 << 10;
  const uint32_t held_shared = mask == 1 ? gpu::joint_held_relu_shared_bytes : gpu::joint_held_shared_bytes;
  if (place->platform == APEX_CUDA && limits.shared_bytes >= hopper_shared_bytes && halves && vectors &&
      a.labels <= gpu::joint_held_most_labels)
    return {&held_kernels[mask][a.type == APEX_BF16],
            gpu::joint_held_threads,
            gpu::joint_held_slab,
            ceil_divide(a.hidden, gpu::joint_held_slab),
            0,
            held_shared,
            16,
            12,
            gpu::joint_held_warps / ceil_divide(std::max<int64_t>(1, a.labels), gpu::joint_held_warp_labels)};
  const bool shifted = !vectors && mask < 2 && takes_shifted(a.hidden, a.type, a.grad_output, a.f, a.g),
             wide = vectors || shifted;
  const int64_t slab = wide ? 8 * width : limits.block_multiple;  // a warp's lanes
  const uint32_t row_bytes = a.labels > (vectors   ? gpu::joint_labels
                                         : shifted ? gpu::joint_labels_of_shifted
                                                   : gpu::joint_labels_of_elements)
                                 ? uint32_t(slab * sum_bytes(a.type))
                                 : 0;
  return {shifted ? &shifted_kernels[mask][a.type == APEX_BF16] : &backward_kernels[mask][kernel_of(a.type, vectors)],
          gpu::joint_backward_threads,
          slab,
          ceil_divide(a.hidden, slab),
          row_bytes,
          0,
          3,
          halves ? 4 : 2,
          0};
}
// Blocks that share an item's frames, and frames of each.
int32_t split_frames(const apex_place* place, const Backward& backward, const DeviceLimits& limits,
                     gpu::TransducerJointBackward& a) {
  // AMD's blocks share less memory.
  const int64_t shared = place->platform == APEX_HIP ? 16 << 10 : 32 << 10,
                most_frames = backward.row_bytes ? shared / backward.row_bytes : a.frames;
  int32_t at_once = 0;
  if (const int32_t status = blocks_at_once(*place, backward.kernel, backward.threads,
                                            backward.row_bytes ? uint32_t(shared) : backward.shared, &at_once))
    return status;
  const int64_t slots = int64_t(limits.multiprocessors) * std::max(1, at_once ? at_once : 2);
  // Turns of all slots, times what a block takes.
  constexpr int64_t most_splits = 256;
  int64_t best = 0;
  for (int64_t splits = ceil_divide(a.frames, most_frames);
       splits <= std::min<int64_t>(most_splits, a.frames) || best == 0; ++splits) {
    const int64_t tile = ceil_divide(a.frames, splits), used = ceil_divide(a.frames, tile);
    const int64_t cost = ceil_divide(a.batch * backward.slabs * used, slots) * backward.cost(tile, used > 1);
    if (best && cost >= best) continue;
    best = cost;
    a.splits = int32_t(used);
    a.tile_frames = int32_t(tile);
  }
  return APEX_OK;
}
}  // namespace
}  // namespace apex

using namespace apex;

int32_t apex_transducer_joint_forward(const apex_place* place, const gpu::TransducerJointForward* arguments) {
  gpu::TransducerJointForward a = *arguments;
  int32_t variant;
  if (const int32_t status = choose(place, a, &variant)) return status;
  if (a.rows == 0 || a.hidden == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    transducer_joint_forward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const bool dropout = a.seed != nullptr;
  const int64_t width = dropout ? 8 : vector_width(a.type);
  const bool vectors = rows_in_vectors(a.hidden, width, a.f, a.g, a.output);
  void* parameters[] = {&a};
  const bool staged = !vectors && !dropout && takes_staged(a.hidden, a.type);
  apex_kernel& kernel =
      staged ? staged_kernels[a.type == APEX_BF16] : forward_kernels[dropout][kernel_of(a.type, vectors)];
  a.lanes = lanes_for(ceil_divide(a.hidden, vectors || dropout ? width : 1));
  int64_t labels = gpu::joint_tile_labels, groups = gpu::joint_forward_threads / a.lanes,
          frames = dropout ? gpu::joint_tile_frames<true> : gpu::joint_tile_frames<false>;
  if (staged) {
    // So many frames that the blocks come in one wave, within bounds.
    labels = gpu::joint_staged_sums / gpu::joint_staged_columns(a.hidden);
    groups = 1;
    const int64_t tiles = std::max<int64_t>(1, a.batch * ceil_divide(a.labels, labels)),
                  wave = int64_t(limits.multiprocessors) * 4;
    frames = std::clamp<int64_t>(ceil_divide(a.frames, std::max<int64_t>(1, wave / tiles)), 8, 64);
    a.tile_frames = int32_t(frames);
  }
  const int64_t units = a.batch * ceil_divide(a.frames, groups * frames) * ceil_divide(a.labels, labels);
  const int64_t blocks = std::clamp<int64_t>(units, 1, int64_t(limits.multiprocessors) * 64);
  return apex_launch(place, &kernel, {uint32_t(blocks), 1, 1}, {gpu::joint_forward_threads, 1, 1}, 0, parameters);
}

int32_t apex_transducer_joint_backward(const apex_place* place, const gpu::TransducerJointBackward* arguments,
                                       const apex_workspace* workspace) {
  gpu::TransducerJointBackward a = *arguments;
  int32_t variant;
  if (const int32_t status = choose(place, a, &variant)) return status;
  a.splits = 1;
  a.tile_frames = int32_t(std::max<int64_t>(1, a.frames));
  if (a.batch == 0 || a.hidden == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    transducer_joint_backward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  if (takes_apart(a)) return launch_apart(place, a, limits);
  const Backward backward = backward_of(place, a, limits);
  if (a.frames && a.labels)
    if (const int32_t status = split_frames(place, backward, limits, a)) return status;
  if (a.splits > 1) {
    const int64_t sums = a.splits * a.batch * a.labels * a.hidden;
    uint32_t* counters;
    if (const int32_t status =
            take_workspace(*place, workspace, sums * sum_bytes(a.type), a.batch * a.hidden, &a.partials, &counters))
      return status;
    a.counters = reinterpret_cast<gpu::u8*>(counters);
  }
  const int64_t blocks = std::min<int64_t>(a.batch * a.splits * backward.slabs, most_threads / backward.threads);
  void* parameters[] = {&a};
  return apex_launch(place, backward.kernel, {uint32_t(blocks), 1, 1}, {uint32_t(backward.threads), 1, 1},
                     backward.shared + backward.row_bytes * uint32_t(a.tile_frames), parameters);
}
