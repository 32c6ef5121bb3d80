#include "welford_parallel.h"

#define KERNEL(name, Math)                                                                     \
  extern "C" GPU_KERNEL(gpu::channel_threads) void name(gpu::WelfordParallel a) {              \
    gpu::await_previous_kernel();                                                              \
    const gpu::i64 channel = (gpu::i64)gpu::block_x() * gpu::block_size_x() + gpu::thread_x(); \
    if (channel < a.channels) gpu::welford_parallel<Math>(a, channel);                         \
  }                                                                                            \
  GPU_REGISTER(name)
KERNEL(welford_parallel_f32, float)
KERNEL(welford_parallel_f64, double)
