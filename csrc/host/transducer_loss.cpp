#include "transducer_loss.h"

#include <algorithm>

#include "device_limits.h"
#include "dtypes.h"
#include "status.h"
#include "values.h"
#include "workspace.h"

namespace apex {
namespace {
constexpr const char* unit = "transducer_loss";
// By apex_dtype.
apex_kernel emission_kernels[] = {{unit, "transducer_loss_emissions_f32", 0, 1},
                                  {unit, "transducer_loss_emissions_f16", 0, 1},
                                  {unit, "transducer_loss_emissions_bf16", 0, 1},
                                  {unit, "transducer_loss_emissions_f64", 0, 1}};
apex_kernel lattice_kernels[] = {{unit, "transducer_loss_lattice_f32", 0, 1},
                                 {unit, "transducer_loss_lattice_f64", 0, 1}};
apex_kernel backward_kernels[] = {{unit, "transducer_loss_backward_f32", 0, 1},
                                  {unit, "transducer_loss_backward_f16", 0, 1},
                                  {unit, "transducer_loss_backward_bf16", 0, 1},
                                  {unit, "transducer_loss_backward_f64", 0, 1}};

template <class Arguments> int32_t check_items(const apex_place& place, const Arguments& a) {
  if (place.platform != APEX_CPU) return APEX_OK;
  const auto* const ends = reinterpret_cast<const int64_t*>(a.batch_offset);
  const long long most = a.labels - 1;
  long long end = 0;
  for (long long b = 0; b < a.batch; ++b) {
    const long long t = integer_at(a.f_len, b, a.wide_lengths), u = integer_at(a.g_len, b, a.wide_lengths);
    if (t < 1 || t > a.frames)
      return fail(APEX_ERROR_VALUE, "%s: f_len[%lld] is %lld, outside [1, %lld]: an item has at least one frame", unit,
                  b, t, (long long)a.frames);
    if (u < 0 || u > most)
      return fail(APEX_ERROR_VALUE, "%s: y_len[%lld] is %lld, but label has %lld columns", unit, b, u, most);
    for (long long i = 0; i < u; ++i) {
      const long long label = integer_at(a.label, b * most + i, a.wide_labels);
      if (label < 0 || label >= a.classes)
        return fail(APEX_ERROR_INDEX, "%s: label[%lld, %lld] is %lld, outside [0, %lld)", unit, b, i, label,
                    (long long)a.classes);
    }
    if (!ends) continue;
    end += t * (u + 1);
    if (ends[b] != end)
      return fail(APEX_ERROR_VALUE,
                  "%s: batch_offset[%lld] is %lld, but the sum of f_len * (y_len + 1) up to it is %lld", unit, b,
                  (long long)ends[b], end);
    if (end > a.rows)
      return fail(APEX_ERROR_VALUE, "%s: packed x has %lld rows, less than the %lld of the items", unit,
                  (long long)a.rows, end);
  }
  return APEX_OK;
}

// Sets *cpu where the CPU variant serves.
template <class Arguments> int32_t resolve(const apex_place* place, const Arguments& a, int32_t other_type, bool* cpu) {
  const auto known = [](int32_t type) { return type >= APEX_F32 && type <= APEX_F64; };
  if (!known(a.type) || !known(other_type) || (a.type == APEX_F64) != (other_type == APEX_F64))
    return fail(APEX_ERROR_ARGUMENT,
                "%s: element types are float32, float16, bfloat16 and float64, and float64 goes with float64 alone",
                unit);
  if (a.frames > 0x3fffffff || a.labels > 0x3fffffff || a.classes > 0x3fffffff)
    return fail(APEX_ERROR_VALUE, "%s: %lld frames, %lld labels, %lld classes: 2^30 - 1 are the most", unit,
                (long long)a.frames, (long long)a.labels, (long long)a.classes);
  if (const int32_t status = check_items(*place, a)) return status;
  int32_t variant;
  const int32_t status = choose_variant(*place, unit, &variant);
  *cpu = variant == APEX_VARIANT_CPU;
  return status;
}

// Rows that a warp takes together: as many as it has lanes, fewer where that would leave multiprocessors idle, or where
// they are so long that their elements could not be counted in 32 bits.
int32_t tile_rows(int64_t rows, int64_t classes, const DeviceLimits& limits) {
  constexpr int64_t warps = 16, most_classes = 1 << 24;  // of a multiprocessor
  int32_t tile = classes > most_classes ? 1 : limits.warp_size;
  while (tile > 1 && ceil_divide(rows, tile) < warps * limits.multiprocessors) tile /= 2;
  return tile;
}
// Lanes that share a row: each has `ahead` vectors or fewer, where a warp has so many lanes; none is idle for want of
// rows.
int32_t log_lanes(int32_t type, int64_t classes, int32_t tile, const DeviceLimits& limits) {
  constexpr int64_t ahead = 4;  // in the kernel
  const int64_t width = type == APEX_F64 ? 2 : type == APEX_F32 ? 4 : 8, vectors = ceil_divide(classes, width);
  int32_t log = 0;
  while ((1 << log) < limits.warp_size && (vectors > ahead << log || tile << log < limits.warp_size)) ++log;
  return log;
}
// A kernel whose warps take rows.
template <class Arguments> int32_t launch_rows(const apex_place* place, apex_kernel* kernels,
                                               const DeviceLimits& limits, Arguments& a, int64_t rows) {
  const int64_t threads = gpu::transducer_loss_threads, of_block = threads / limits.warp_size * a.tile_rows;
  const int64_t blocks = std::min(ceil_divide(rows, of_block), most_threads / threads);
  void* parameters[] = {&a};
  return apex_launch(place, &kernels[a.type], {uint32_t(std::max<int64_t>(1, blocks)), 1, 1}, {uint32_t(threads), 1, 1},
                     0, parameters);
}
}  // namespace
}  // namespace apex

using namespace apex;

int32_t apex_transducer_loss_forward(const apex_place* place, const gpu::TransducerLossForward* arguments,
                                     const apex_workspace* workspace) {
  gpu::TransducerLossForward a = *arguments;
  bool cpu = false;
  if (const int32_t status = resolve(place, a, a.loss_type, &cpu)) return status;
  const int64_t emissions = a.batch * (a.frames + a.labels - 1) * a.labels * 2;
  if (const int32_t status = take_workspace(workspace, emissions * sum_bytes(a.type), &a.emissions)) return status;
  if (cpu) {
    transducer_loss_forward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const int64_t nodes = a.batch * a.frames * a.labels;
  a.tile_rows = tile_rows(nodes, a.classes, limits);
  a.log_lanes = log_lanes(a.type, a.classes, a.tile_rows, limits);
  if (const int32_t status = launch_rows(place, emission_kernels, limits, a, nodes)) return status;
  const int64_t threads = std::min<int64_t>(gpu::transducer_lattice_threads,
                                            ceil_divide(a.labels, limits.block_multiple) * limits.block_multiple);
  void* parameters[] = {&a};
  const int64_t blocks = std::min<int64_t>(2 * a.batch, most_threads / threads);
  return apex_launch(place, &lattice_kernels[a.type == APEX_F64], {uint32_t(blocks), 1, 1}, {uint32_t(threads), 1, 1},
                     0, parameters);
}

int32_t apex_transducer_loss_backward(const apex_place* place, const gpu::TransducerLossBackward* arguments) {
  gpu::TransducerLossBackward a = *arguments;
  bool cpu = false;
  if (const int32_t status = resolve(place, a, a.grad_type, &cpu)) return status;
  if (a.classes == 0) return APEX_OK;
  if (cpu) {
    transducer_loss_backward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  a.tile_rows = tile_rows(a.rows, a.classes, limits);
  return launch_rows(place, backward_kernels, limits, a, a.rows);
}
