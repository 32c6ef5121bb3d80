#include "norm.h"
#include "norm_teams.h"

#define KERNELS(...) NORM_ROWS_KERNELS(layer_norm, true, __VA_ARGS__)
NORM_ROWS(KERNELS)
#undef KERNELS
#define KERNELS(...) NORM_FEW_KERNELS(layer_norm, true, __VA_ARGS__)
NORM_FEW(KERNELS)
#undef KERNELS
#define KERNELS(...) NORM_LONG_KERNELS(layer_norm, true, __VA_ARGS__)
NORM_LONG(KERNELS)
#undef KERNELS
#define KERNELS(...) NORM_MATH_KERNELS(layer_norm, true, __VA_ARGS__)
NORM_MATH(KERNELS)

#if !defined(GPU_HIP)
#define TEAMS_KERNEL(part, Arguments, name, hidden, vectors, teams, stages)                                  \
  extern "C" GPU_KERNEL(gpu::Teams<hidden, vectors, teams, stages>::block, 1) void                           \
  layer_norm_##part##_teams_##name##_##hidden(gpu::Arguments arguments) {                                    \
    gpu::await_previous_kernel();                                                                            \
    gpu::layer_norm_##part##_teams<gpu::type_##name, gpu::Teams<hidden, vectors, teams, stages>>(arguments); \
  }                                                                                                          \
  GPU_REGISTER(layer_norm_##part##_teams_##name##_##hidden)
#define FORWARD_KERNELS(...) \
  TEAMS_KERNEL(forward, NormForward, bf16, __VA_ARGS__) TEAMS_KERNEL(forward, NormForward, f16, __VA_ARGS__)
#define BACKWARD_KERNELS(...) \
  TEAMS_KERNEL(backward, NormBackward, bf16, __VA_ARGS__) TEAMS_KERNEL(backward, NormBackward, f16, __VA_ARGS__)
NORM_FORWARD_TEAMS(FORWARD_KERNELS)
NORM_BACKWARD_TEAMS(BACKWARD_KERNELS)
#endif
