#include "welford_parallel.h"

#include "device/welford_parallel.h"
#include "host/parallel.h"
#include "status.h"

extern "C" int32_t apex_welford_parallel(const apex_place* place, const gpu::WelfordParallel* arguments) {
  static apex_kernel kernels[] = {{"welford_parallel", "welford_parallel_f32", 0, 1},
                                  {"welford_parallel", "welford_parallel_f64", 0, 1}};
  const gpu::WelfordParallel& a = *arguments;
  const bool doubles = a.input_type == APEX_F64;
  if ((a.input_type != APEX_F32 && !doubles) || (a.running_mean && (a.running_type == APEX_F64) != doubles))
    return apex::fail(
        APEX_ERROR_ARGUMENT,
        "welford_parallel: statistics are float32 or float64; running statistics are float64 beside float64 alone");
  int32_t variant;
  if (const int32_t status = apex::choose_variant(*place, "welford_parallel", &variant)) return status;
  if (variant == APEX_VARIANT_CPU) {
    apex::parallel_for(0, a.channels, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t channel = begin; channel < end; ++channel)
        doubles ? gpu::welford_parallel<double>(a, channel) : gpu::welford_parallel<float>(a, channel);
    });
    return APEX_OK;
  }
  void* parameters[] = {const_cast<gpu::WelfordParallel*>(arguments)};
  const uint32_t threads = 128;
  const auto blocks = uint32_t((a.channels + threads - 1) / threads);
  return apex_launch(place, &kernels[doubles], {blocks, 1, 1}, {threads, 1, 1}, 0, parameters);
}
