#include "transducer_loss.h"

#include <algorithm>

#include "device_limits.h"
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

// A kernel whose rows are a block's each, or, where they are short, those of a warp or of so many of its lanes that
// each has two vectors or fewer: a lane without one would do as much beside them.
template <class Arguments> int32_t launch_rows(const apex_place* place, apex_kernel* kernels,
                                               const DeviceLimits& limits, Arguments a) {
  constexpr int64_t ahead = 4;  // vectors of a thread, in the kernels
  const int64_t width = a.type == APEX_F64   ? 2
                        : a.type == APEX_F32 ? 4
                                             : 8,
                vectors = ceil_divide(a.classes, width), wanted = ceil_divide(vectors, ahead);
  int64_t threads = gpu::transducer_loss_threads, rows_of_a_block = 1;
  a.log_lanes = -1;
  if (wanted <= limits.warp_size) {
    a.log_lanes = 3;  // as many as there are elements before a row's first vector, and after its last
    while ((1 << a.log_lanes) < limits.warp_size && vectors > int64_t{2} << a.log_lanes) ++a.log_lanes;
    rows_of_a_block = threads >> a.log_lanes;
  } else {
    threads = std::min(threads, ceil_divide(wanted, limits.block_multiple) * limits.block_multiple);
  }
  const int64_t blocks = std::min(ceil_divide(a.batch * a.frames * a.labels, rows_of_a_block), most_threads / threads);
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
  if (const int32_t status = take_workspace(workspace, emissions * (a.type == APEX_F64 ? 8 : 4), &a.emissions))
    return status;
  if (cpu) {
    transducer_loss_forward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  if (const int32_t status = launch_rows(place, emission_kernels, limits, a)) return status;
  const bool wide = a.type == APEX_F64;
  const int64_t shared = 2 * a.labels * (wide ? 16 : 8);
  const int64_t threads = std::min<int64_t>(gpu::transducer_lattice_threads,
                                            ceil_divide(a.labels, limits.block_multiple) * limits.block_multiple);
  a.shared_diagonals = shared <= std::min<int64_t>(limits.shared_bytes, 48 << 10);
  void* parameters[] = {&a};
  const int64_t blocks = std::min<int64_t>(2 * a.batch, most_threads / threads);
  return apex_launch(place, &lattice_kernels[wide], {uint32_t(blocks), 1, 1}, {uint32_t(threads), 1, 1},
                     a.shared_diagonals ? uint32_t(shared) : 0, parameters);
}

int32_t apex_transducer_loss_backward(const apex_place* place, const gpu::TransducerLossBackward* arguments) {
  const gpu::TransducerLossBackward& a = *arguments;
  bool cpu = false;
  if (const int32_t status = resolve(place, a, a.grad_type, &cpu)) return status;
  if (a.classes == 0) return APEX_OK;
  if (cpu) {
    transducer_loss_backward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  return launch_rows(place, backward_kernels, limits, a);
}
