#include "group_norm_first.h"
#include "group_norm_halves.h"
#include "group_norm_tile.h"

#define GROUP_NORM_KERNEL(threads, blocks, name, ...)                          \
  extern "C" GPU_KERNEL(threads, blocks) void name(gpu::GroupNorm arguments) { \
    gpu::await_previous_kernel();                                              \
    __VA_ARGS__(arguments);                                                    \
  }                                                                            \
  GPU_REGISTER(name)

// In two launches: V(name, element type, elements of a vector).
#define KERNELS(name, type, width)                                                  \
  GROUP_NORM_KERNEL(gpu::group_norm_threads, 3, group_norm_statistics_last_##name,  \
                    gpu::group_norm_statistics_last<gpu::type, width>)              \
  GROUP_NORM_KERNEL(gpu::group_norm_threads, 3, group_norm_apply_last_##name,       \
                    gpu::group_norm_apply_last<gpu::type, width>)                   \
  GROUP_NORM_KERNEL(gpu::group_norm_threads, 2, group_norm_sums_last_##name,        \
                    gpu::group_norm_sums_last<gpu::type, width>)                    \
  GROUP_NORM_KERNEL(gpu::group_norm_threads, 2, group_norm_gradient_last_##name,    \
                    gpu::group_norm_gradient_last<gpu::type, width>)                \
  GROUP_NORM_KERNEL(gpu::group_norm_threads, 3, group_norm_statistics_first_##name, \
                    gpu::group_norm_statistics_first<gpu::type, width>)             \
  GROUP_NORM_KERNEL(gpu::group_norm_threads, 3, group_norm_apply_first_##name,      \
                    gpu::group_norm_apply_first<gpu::type, width>)                  \
  GROUP_NORM_KERNEL(gpu::group_norm_threads, 3, group_norm_sums_first_##name,       \
                    gpu::group_norm_sums_first<gpu::type, width>)                   \
  GROUP_NORM_KERNEL(gpu::group_norm_threads, 3, group_norm_gradient_first_##name,   \
                    gpu::group_norm_gradient_first<gpu::type, width>)
KERNELS(f32, type_f32, 4)
KERNELS(f16, type_f16, 8)
KERNELS(bf16, type_bf16, 8)
KERNELS(f64, type_f64, 1)
KERNELS(any1, any_type, 1)

// In one.
GROUP_NORM_KERNEL(gpu::group_norm_tile_threads, 2, group_norm_forward_tile_f32,
                  gpu::group_norm_forward_tile<gpu::type_f32, 4>)
GROUP_NORM_KERNEL(gpu::group_norm_tile_threads, 1, group_norm_backward_tile_f32,
                  gpu::group_norm_backward_tile<gpu::type_f32, 4>)
// Blocks of a multiprocessor in the backward: compilers for what came before Hopper keep less in as many registers.
#if defined(GPU_CUDA) && __CUDA_ARCH__ < 900
#define HALVES_BLOCKS 1
#else
#define HALVES_BLOCKS 2
#endif
#define HALVES_KERNELS(name, type)                                                                  \
  GROUP_NORM_KERNEL(gpu::group_norm_halves_threads, 2, group_norm_forward_tile_##name,              \
                    gpu::group_norm_forward_halves<gpu::type>)                                      \
  GROUP_NORM_KERNEL(gpu::group_norm_halves_threads, HALVES_BLOCKS, group_norm_backward_tile_##name, \
                    gpu::group_norm_backward_halves<gpu::type>)
HALVES_KERNELS(f16, type_f16)
HALVES_KERNELS(bf16, type_bf16)

template <class Math> GPU_FN void finish(const gpu::GroupNorm& a) { gpu::group_norm_finish<Math>(a, gpu::block_x()); }
GROUP_NORM_KERNEL(gpu::group_norm_threads, 1, group_norm_finish, finish<float>)
