// softmax(input + mask) over the last dimension with dropout after it, as attention takes it: the kernels of
// scaled_masked_softmax (softmax_registers.h, softmax_long.h) with masks of bytes or numbers, and random numbers.
//
// The forward writes what dropout leaves beside the softmax, and the backward finds again what was kept from the key:
// no mask is stored, unless it is asked for.
#include "softmax_long.h"
#include "softmax_registers.h"

#define SOFTMAX_KERNEL(name, Arguments, bounds, ...)                                          \
  extern "C" GPU_KERNEL bounds void masked_softmax_dropout_##name(gpu::Arguments arguments) { \
    gpu::await_previous_kernel();                                                             \
    gpu::softmax_##__VA_ARGS__(arguments);                                                    \
  }                                                                                           \
  GPU_REGISTER(masked_softmax_dropout_##name)
#define SOFTMAX_FORWARD(name, bounds, ...) SOFTMAX_KERNEL(forward_##name, SoftmaxForward, bounds, forward_##__VA_ARGS__)
#define SOFTMAX_BACKWARD(name, bounds, ...) \
  SOFTMAX_KERNEL(backward_##name, SoftmaxBackward, bounds, backward_##__VA_ARGS__)
// Threads a block, and how many such blocks must fit in a multiprocessor's registers.
#define ANY_BLOCK (gpu::softmax_threads, 1)
#define LANES_BLOCK (gpu::softmax_fixed_threads, 10)
#define WARP_BLOCK (gpu::softmax_fixed_threads, 8)

// By element type and vectors a thread. `odd`: rows that do not begin and end with a vector.
#define ROWS(name, type, vectors, bounds)                                                                             \
  SOFTMAX_FORWARD(name##x##vectors, bounds, rows<type, vectors, true, true, 0, gpu::softmax_threads, true>)           \
  SOFTMAX_FORWARD(odd_##name##x##vectors, ANY_BLOCK, rows<type, vectors, false, true, 0, gpu::softmax_threads, true>) \
  SOFTMAX_BACKWARD(name##x##vectors, bounds, rows<type, vectors, true, 0, gpu::softmax_threads, true>)                \
  SOFTMAX_BACKWARD(odd_##name##x##vectors, ANY_BLOCK, rows<type, vectors, false, 0, gpu::softmax_threads, true>)
// Aligned, of a warp a row.
#define WARP(name, type, vectors)                                                                                   \
  SOFTMAX_FORWARD(name##x##vectors##w1, WARP_BLOCK, rows<type, vectors, true, true, 1, gpu::softmax_threads, true>) \
  SOFTMAX_BACKWARD(name##x##vectors##w1, WARP_BLOCK, rows<type, vectors, true, 1, gpu::softmax_threads, true>)
#define LONG(name, ...)                                            \
  SOFTMAX_FORWARD(long_##name, ANY_BLOCK, long<__VA_ARGS__, true>) \
  SOFTMAX_BACKWARD(long_##name, ANY_BLOCK, long<__VA_ARGS__, true>)
#define TYPE(name, type)           \
  ROWS(name, type, 1, LANES_BLOCK) \
  ROWS(name, type, 4, ANY_BLOCK)   \
  WARP(name, type, 2)              \
  WARP(name, type, 4)              \
  LONG(name, gpu::RowVectors<type, false>)
TYPE(bf16, gpu::type_bf16)
TYPE(f16, gpu::type_f16)
TYPE(f32, gpu::type_f32)
LONG(any, gpu::RowElements<float>)
LONG(f64, gpu::RowElements<double>)
