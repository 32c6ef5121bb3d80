#include "multi_tensor_lamb_stage1.h"

// Two blocks a multiprocessor: one alone, which more than 64 registers would mean, does not keep memory busy. On sm_70
// the compiler would spill too much for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
#define BLOCKS 1
#else
#define BLOCKS 2
#endif

#define KERNEL(name, Op, Math, ...)                                                                \
  extern "C" GPU_KERNEL(gpu::multi_tensor_threads, BLOCKS) void multi_tensor_lamb_stage1_##name(   \
      gpu::TensorTable table, gpu::Op<Math>::Arguments arguments, gpu::ReductionScratch scratch) { \
    gpu::MultiTensorReduce<Math, __VA_ARGS__>::run<gpu::Op<Math>>(table, arguments, scratch);      \
  }                                                                                                \
  GPU_REGISTER(multi_tensor_lamb_stage1_##name)
MULTI_TENSOR_LAMB_STAGE1(KERNEL)
