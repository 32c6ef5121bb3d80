// Of few rows each thread takes a vector, in the `few` kernels. Rows whose vectors fit in the registers of some lanes
// of a warp, of a warp or of a block take the `rows` kernels, and those of a whole multiprocessor's the `held` ones:
// one read of what they keep, one write. Longer rows take the `long` kernels, which read a row twice; short rows that
// do not begin with a vector the `strip` kernels, which go through shared memory. What lies past the diagonal is
// written and never read. The order of every sum is fixed.
//
// Memory is read and written 16 bytes at a time, whatever the rows' length: a row begins within its first vector and
// ends within its last, and only there are elements written one by one.
#include "softmax_few.h"
#include "softmax_held.h"
#include "softmax_long.h"
#include "softmax_registers.h"
#include "softmax_strip.h"

#define SOFTMAX_KERNEL(name, Arguments, bounds, ...)                                         \
  extern "C" GPU_KERNEL bounds void scaled_masked_softmax_##name(gpu::Arguments arguments) { \
    gpu::await_previous_kernel();                                                            \
    __VA_ARGS__(arguments);                                                                  \
  }                                                                                          \
  GPU_REGISTER(scaled_masked_softmax_##name)
// They wait by themselves, when they know their places.
#define FEW_KERNEL(name, Arguments, ...)                                                                    \
  extern "C" GPU_KERNEL(gpu::few_row_threads) void scaled_masked_softmax_##name(gpu::Arguments arguments) { \
    gpu::softmax_##__VA_ARGS__(arguments);                                                                  \
  }                                                                                                         \
  GPU_REGISTER(scaled_masked_softmax_##name)
#define SOFTMAX_FORWARD(name, bounds, ...) \
  SOFTMAX_KERNEL(forward_##name, SoftmaxForward, bounds, gpu::softmax_forward_##__VA_ARGS__)
#define SOFTMAX_BACKWARD(name, bounds, ...) \
  SOFTMAX_KERNEL(backward_##name, SoftmaxBackward, bounds, gpu::softmax_backward_##__VA_ARGS__)
// Threads a block, and how many such blocks must fit in a multiprocessor's registers.
#define ANY_BLOCK (gpu::softmax_threads, 1)
#define FIXED_FORWARD (gpu::softmax_fixed_threads, 8)
#define FIXED_BACKWARD (gpu::softmax_fixed_threads, 5)
#define ODD_FORWARD (gpu::softmax_fixed_threads, 6)
#define ODD_BACKWARD (gpu::softmax_fixed_threads, 4)
#define HELD_BLOCK (gpu::softmax_held_threads, 1)
#define STRIP_BLOCK (gpu::softmax_fixed_threads, 6)

// By element type and vectors a thread. `odd`: rows that do not begin and end with a vector, with a mask or without.
#define ROWS(name, type, vectors)                                                        \
  SOFTMAX_FORWARD(name##x##vectors, ANY_BLOCK, rows<type, vectors, true, false>)         \
  SOFTMAX_FORWARD(masked_##name##x##vectors, ANY_BLOCK, rows<type, vectors, true, true>) \
  SOFTMAX_FORWARD(odd_##name##x##vectors, ANY_BLOCK, rows<type, vectors, false, true>)   \
  SOFTMAX_BACKWARD(name##x##vectors, ANY_BLOCK, rows<type, vectors, true>)               \
  SOFTMAX_BACKWARD(odd_##name##x##vectors, ANY_BLOCK, rows<type, vectors, false>)
// Aligned, of one or two warps a row: what is known when compiled saves instructions and registers.
#define FIXED(name, type, vectors, warps)                                       \
  SOFTMAX_FORWARD(name, FIXED_FORWARD, rows<type, vectors, true, false, warps>) \
  SOFTMAX_BACKWARD(name, FIXED_BACKWARD, rows<type, vectors, true, warps>)
// Not aligned, of one warp a row.
#define ODD(name, type, vectors)                                           \
  SOFTMAX_FORWARD(name, ODD_FORWARD, rows<type, vectors, false, false, 1>) \
  SOFTMAX_BACKWARD(name, ODD_BACKWARD, rows<type, vectors, false, 1>)
#define STRIP(name, type, items)                         \
  SOFTMAX_FORWARD(name, STRIP_BLOCK, strip<type, items>) \
  SOFTMAX_BACKWARD(name, STRIP_BLOCK, strip<type, items>)
// Aligned, of a block of the largest size a row.
#define FEW(name, type)                                                          \
  FEW_KERNEL(forward_few_##name, SoftmaxForward, forward_few<type, false>)       \
  FEW_KERNEL(forward_few_masked_##name, SoftmaxForward, forward_few<type, true>) \
  FEW_KERNEL(backward_few_##name, SoftmaxBackward, backward_few<type>)
#define HELD(name, type)                                                                                            \
  SOFTMAX_FORWARD(name, HELD_BLOCK, rows<type, 8, true, false, gpu::softmax_held_warps, gpu::softmax_held_threads>) \
  SOFTMAX_BACKWARD(name, HELD_BLOCK, held<type, 8>)
#define LONG(name, ...)                                      \
  SOFTMAX_FORWARD(long_##name, ANY_BLOCK, long<__VA_ARGS__>) \
  SOFTMAX_BACKWARD(long_##name, ANY_BLOCK, long<__VA_ARGS__>)
#define TYPE(name, type)             \
  FEW(name, type)                    \
  ROWS(name, type, 1)                \
  ROWS(name, type, 4)                \
  FIXED(name##x8, type, 8, 1)        \
  FIXED(name##x8w2, type, 8, 2)      \
  ODD(odd_##name##x9, type, 9)       \
  STRIP(strip_##name##x9, type, 9)   \
  STRIP(strip_##name##x19, type, 19) \
  HELD(held_##name, type)            \
  LONG(name, gpu::RowVectors<type, false>)
TYPE(bf16, gpu::type_bf16)
TYPE(f16, gpu::type_f16)
TYPE(f32, gpu::type_f32)
LONG(any, gpu::RowElements<float>)
LONG(f64, gpu::RowElements<double>)
