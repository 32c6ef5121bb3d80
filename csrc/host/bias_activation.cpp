// Bias and activation: launches and the CPU variant. csrc/device/bias_activation.h says what is computed.
#include "bias_activation.h"

#include <algorithm>
#include <cstring>

#include "device_limits.h"
#include "multi_tensor_cpu.h"
#include "status.h"

namespace apex {
namespace {
constexpr const char* unit = "bias_activation";
int64_t columns_of(const gpu::BiasActivation& a) { return a.gated ? 2 * a.hidden : a.hidden; }

// ---- kernels
enum Kind { bf16x8, f16x8, f32x4, any1, f64 };
#define APEX_ACTIVATION_KERNEL(name) {unit, "bias_activation_" #name, 0, 1}
#define APEX_ACTIVATION_KINDS(way)                                                                                     \
  {APEX_ACTIVATION_KERNEL(way##bf16x8), APEX_ACTIVATION_KERNEL(way##f16x8), APEX_ACTIVATION_KERNEL(way##f32x4),        \
   APEX_ACTIVATION_KERNEL(way##any1), APEX_ACTIVATION_KERNEL(way##f64)}
apex_kernel forward_kernels[2][5] = {APEX_ACTIVATION_KINDS(forward_), APEX_ACTIVATION_KINDS(forward_gated_)};
apex_kernel backward_kernels[2][5] = {APEX_ACTIVATION_KINDS(backward_), APEX_ACTIVATION_KINDS(backward_gated_)};
apex_kernel finish_kernels[2] = {APEX_ACTIVATION_KERNEL(finish), APEX_ACTIVATION_KERNEL(finish_f64)};

// How blocks share the tensor; the same from prepare and from the launch, as it depends on the arguments alone.
Kind lay_out(gpu::BiasActivation& a, const DeviceLimits& limits, bool sums_bias) {
  const Kind wide = a.type == APEX_BF16 ? bf16x8 : a.type == APEX_F16 ? f16x8 : f32x4;
  const int64_t vector = wide == f32x4 ? 4 : 8;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a.input) | reinterpret_cast<uintptr_t>(a.output) | reinterpret_cast<uintptr_t>(a.grad_output);
  const bool vectors = a.type != APEX_F64 && a.hidden % vector == 0 && bits % 16 == 0;
  const int64_t lanes = vectors ? a.hidden / vector : a.hidden;
  a.lane_threads = int32_t(std::min<int64_t>(lanes, gpu::bias_activation_threads));
  a.column_blocks = uint32_t(ceil_divide(lanes, a.lane_threads));
  // Sums of the bias's gradient cost memory for every part: with them just as many blocks as run at once.
  const int64_t blocks = int64_t(limits.multiprocessors) * (sums_bias ? 4 : 16), slots = gpu::bias_activation_threads / a.lane_threads;
  a.parts = std::clamp<int64_t>(blocks / a.column_blocks, 1, std::max<int64_t>(1, ceil_divide(a.rows, slots * 4)));
  return a.type == APEX_F64 ? f64 : vectors ? wide : any1;
}
int32_t launch(const apex_place* place, apex_kernel& kernel, int64_t blocks, uint32_t threads, const gpu::BiasActivation& a) {
  void* parameters[] = {const_cast<gpu::BiasActivation*>(&a)};
  return apex_launch(place, &kernel, {uint32_t(blocks), 1, 1}, {threads, 1, 1}, 0, parameters);
}

// ---- the CPU variant
template <class Math> APEX_INLINE void load_bias(const gpu::BiasActivation& a, const TileConversions<Math>& convert, int64_t i, int64_t n, Math* x) {
  if (!a.bias) std::fill(x, x + n, Math(0));
  else if (a.bias_type == DtypeOf<Math>::value) std::memcpy(x, reinterpret_cast<const Math*>(a.bias) + i, size_t(n) * sizeof(Math));
  else convert.load[a.bias_type](x, a.bias, i, n);
}

// Parts of rows, each in tiles of columns; of the backward, with the rows' sum for the bias.
template <class Math, bool backward> struct Rows {
  const gpu::BiasActivation& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const gpu::Activation<Math, true> f(a);
    const int64_t columns = columns_of(a);
    alignas(64) Math bias[2][tile], sums[2][tile], first[tile], second[tile], gradient[tile], made[2][tile];
    for (int64_t part = begin; part < end; ++part)
      for (int64_t i = 0; i < a.hidden; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.hidden - i);
        load_bias(a, convert, i, n, bias[0]);
        if (a.gated) load_bias(a, convert, a.hidden + i, n, bias[1]);
        for (int64_t j = 0; j < n; ++j) sums[0][j] = sums[1][j] = Math(0);
        for (int64_t row = a.rows * part / a.parts; row < a.rows * (part + 1) / a.parts; ++row) {
          const Math* x = load_tile(convert, a.input, a.type, row * columns + i, n, first);
          const Math* gate = a.gated ? load_tile(convert, a.input, a.type, row * columns + a.hidden + i, n, second) : nullptr;
          if constexpr (!backward) {
            for (int64_t j = 0; j < n; ++j) made[0][j] = f(x[j] + bias[0][j]);
            if (gate) for (int64_t j = 0; j < n; ++j) made[0][j] *= gate[j] + bias[1][j];
            store_tile(convert, a.output, a.type, row * a.hidden + i, n, static_cast<const Math*>(made[0]));
          } else {
            const Math* dy = load_tile(convert, a.grad_output, a.type, row * a.hidden + i, n, gradient);
            for (int64_t j = 0; j < n; ++j) {
              Math slope;
              made[1][j] = dy[j] * f.template value<true>(x[j] + bias[0][j], slope);
              made[0][j] = dy[j] * slope;
            }
            if (gate) for (int64_t j = 0; j < n; ++j) made[0][j] *= gate[j] + bias[1][j];
            for (int64_t k = 0; k < (gate ? 2 : 1); ++k) {
              for (int64_t j = 0; j < n; ++j) sums[k][j] += made[k][j];
              store_tile(convert, a.output, a.type, row * columns + k * a.hidden + i, n, static_cast<const Math*>(made[k]));
            }
          }
        }
        if (backward && a.grad_bias)
          for (int64_t k = 0; k < (a.gated ? 2 : 1); ++k)
            std::memcpy(reinterpret_cast<Math*>(a.partials) + part * columns + k * a.hidden + i, sums[k], size_t(n) * sizeof(Math));
      }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};
template <class Math> void sum_parts(const gpu::BiasActivation& a) {
  const int64_t columns = columns_of(a);
  for (int64_t column = 0; column < columns; ++column) {
    Math total[1] = {Math(0)};
    for (int64_t part = 0; part < a.parts; ++part) total[0] += reinterpret_cast<const Math*>(a.partials)[part * columns + column];
    gpu::store_values(a.grad_bias, a.bias_type, column, total);
  }
}
// As many parts whatever the number of threads: the sums stay the same.
int64_t cpu_parts(int64_t rows) { return rows == 0 ? 0 : std::clamp<int64_t>(rows / 16, 1, 64); }

template <class Math, bool backward> void run_cpu(const gpu::BiasActivation& a) {
  const int64_t part_elements = std::max<int64_t>(1, a.rows / std::max<int64_t>(1, a.parts) * a.hidden);
  run_at_level(Rows<Math, backward>{a}, 0, a.parts, std::max<int64_t>(1, elements_per_task / part_elements));
  if (backward && a.grad_bias) sum_parts<Math>(a);
}

// APEX_OK: one of the two is to run.
int32_t resolve(const apex_place* place, const gpu::BiasActivation& a, int32_t* variant) {
  if (a.bias && (a.type == APEX_F64) != (a.bias_type == APEX_F64)) return fail(APEX_ERROR_ARGUMENT, "bias_activation: float64 goes with float64 alone: input and bias alike");
  *variant = apex_resolve(place->platform, place->device, unit);
  if (*variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;
  return *variant == APEX_VARIANT_REFERENCE ? APEX_USE_REFERENCE : APEX_OK;
}

int32_t run_forward(const apex_place* place, gpu::BiasActivation a) {
  int32_t variant = APEX_VARIANT_UNKNOWN;
  if (const int32_t status = resolve(place, a, &variant)) return status;
  if (a.rows == 0 || a.hidden == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    a.parts = std::min<int64_t>(a.rows, 1024);  // nothing is summed: any number does
    a.type == APEX_F64 ? run_cpu<double, false>(a) : run_cpu<float, false>(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const Kind kind = lay_out(a, limits, false);
  return launch(place, forward_kernels[a.gated][kind], a.column_blocks * a.parts, gpu::bias_activation_threads, a);
}
int32_t prepare(const apex_place* place, gpu::BiasActivation* a) {
  int32_t variant = APEX_VARIANT_UNKNOWN;
  if (const int32_t status = resolve(place, *a, &variant)) return status;
  if (variant == APEX_VARIANT_CPU) {
    a->parts = cpu_parts(a->rows);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  if (a->hidden > 0) lay_out(*a, limits, a->grad_bias);
  return APEX_OK;
}
int32_t run_backward(const apex_place* place, gpu::BiasActivation a) {
  int32_t variant = APEX_VARIANT_UNKNOWN;
  if (const int32_t status = resolve(place, a, &variant)) return status;
  if (a.hidden == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    a.type == APEX_F64 ? run_cpu<double, true>(a) : run_cpu<float, true>(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const Kind kind = lay_out(a, limits, a.grad_bias);
  if (a.rows == 0) a.parts = 0;
  int32_t status = APEX_OK;
  if (a.rows > 0) status = launch(place, backward_kernels[a.gated][kind], a.column_blocks * a.parts, gpu::bias_activation_threads, a);
  if (status == APEX_OK && a.grad_bias)
    status = launch(place, finish_kernels[a.type == APEX_F64], ceil_divide(columns_of(a), gpu::bias_activation_finish_columns),
                    gpu::bias_activation_finish_threads, a);
  return status;
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_bias_activation_forward(const apex_place* place, const gpu::BiasActivation* arguments) { return apex::run_forward(place, *arguments); }
extern "C" int32_t apex_bias_activation_prepare(const apex_place* place, gpu::BiasActivation* arguments) { return apex::prepare(place, arguments); }
extern "C" int32_t apex_bias_activation_backward(const apex_place* place, const gpu::BiasActivation* arguments) { return apex::run_backward(place, *arguments); }
