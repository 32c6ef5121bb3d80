#include "xentropy.h"

// Two blocks a multiprocessor; doubles need the registers of one.
#define XENTROPY_KERNEL(blocks, name, Arguments, ...)                                                                    \
  extern "C" GPU_KERNEL(gpu::xentropy_threads, blocks) void name(gpu::Arguments arguments) {                           \
    gpu::await_previous_kernel();                                                                                          \
    __VA_ARGS__(arguments);                                                                                                \
  }                                                                                                                        \
  GPU_REGISTER(name)

#define KERNELS(blocks, name, type)                                                                       \
  XENTROPY_KERNEL(blocks, xentropy_forward_##name, XentropyForward, gpu::xentropy_forward<gpu::type>)     \
  XENTROPY_KERNEL(blocks, xentropy_backward_##name, XentropyBackward, gpu::xentropy_backward<gpu::type>)
KERNELS(2, f32, type_f32)
KERNELS(2, f16, type_f16)
KERNELS(2, bf16, type_bf16)
KERNELS(1, f64, type_f64)
XENTROPY_KERNEL(1, xentropy_merge, XentropyForward, gpu::xentropy_merge<float>)
XENTROPY_KERNEL(1, xentropy_merge_f64, XentropyForward, gpu::xentropy_merge<double>)
