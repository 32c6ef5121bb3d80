#include "xentropy.h"
#include "xentropy_few.h"
#include "xentropy_short.h"

#define XENTROPY_KERNEL(bounds, name, Arguments, ...)                \
  extern "C" GPU_KERNEL bounds void name(gpu::Arguments arguments) { \
    gpu::await_previous_kernel();                                    \
    __VA_ARGS__(arguments);                                          \
  }                                                                  \
  GPU_REGISTER(name)

// It waits by itself, when it knows its place.
#define FEW_KERNEL(name, Arguments, ...)                                                                      \
  extern "C" GPU_KERNEL(gpu::few_row_threads) void name(gpu::Arguments arguments) { __VA_ARGS__(arguments); } \
  GPU_REGISTER(name)

// Threads a block, and how many such blocks a multiprocessor's registers must hold.
#define ONE_BLOCK (gpu::xentropy_threads, 1)
#define TWO_BLOCKS (gpu::xentropy_threads, 2)
#if defined(GPU_CUDA) && __CUDA_ARCH__ < 750
#define SHORT_BLOCKS (gpu::xentropy_short_threads, 12)  // Volta's compiler keeps less in registers
#else
#define SHORT_BLOCKS (gpu::xentropy_short_threads, 16)
#endif
#define KERNELS(bounds, name, type)                                                                   \
  XENTROPY_KERNEL(bounds, xentropy_forward_##name, XentropyForward, gpu::xentropy_forward<gpu::type>) \
  XENTROPY_KERNEL(bounds, xentropy_backward_##name, XentropyBackward, gpu::xentropy_backward<gpu::type>)
#define SHORT_KERNELS(name, type)                                                 \
  XENTROPY_KERNEL(SHORT_BLOCKS, xentropy_forward_short_##name, XentropyForward,   \
                  gpu::xentropy_forward_short<gpu::type>)                         \
  XENTROPY_KERNEL(SHORT_BLOCKS, xentropy_backward_short_##name, XentropyBackward, \
                  gpu::xentropy_backward_short<gpu::type>)
#define FEW_KERNELS(name, type)                                                                  \
  FEW_KERNEL(xentropy_forward_few_##name, XentropyForward, gpu::xentropy_forward_few<gpu::type>) \
  FEW_KERNEL(xentropy_backward_few_##name, XentropyBackward, gpu::xentropy_backward_few<gpu::type>)
KERNELS(TWO_BLOCKS, f32, type_f32)
KERNELS(TWO_BLOCKS, f16, type_f16)
KERNELS(TWO_BLOCKS, bf16, type_bf16)
KERNELS(ONE_BLOCK, f64, type_f64)  // its registers
SHORT_KERNELS(f32, type_f32)
SHORT_KERNELS(f16, type_f16)
SHORT_KERNELS(bf16, type_bf16)
FEW_KERNELS(f32, type_f32)
FEW_KERNELS(f16, type_f16)
FEW_KERNELS(bf16, type_bf16)
XENTROPY_KERNEL(ONE_BLOCK, xentropy_merge, XentropyForward, gpu::xentropy_merge<float>)
XENTROPY_KERNEL(ONE_BLOCK, xentropy_merge_f64, XentropyForward, gpu::xentropy_merge<double>)
