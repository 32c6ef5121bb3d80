// RMS norm to FP8 (norm_codes.h): one read of the input, one byte an element written.
#include "norm_held.h"
#include "norm_to_fp8.h"

FP8_NORM_KERNELS(fp8_rms_norm, false)

// Where the cast is an instruction, 64 registers a thread suffice. AMD's `rows` kernels hold their rows as they are.
#if defined(GPU_CUDA) && __CUDA_ARCH__ >= 890
#define BLOCKS 2
#else
#define BLOCKS 1
#endif
#if !defined(GPU_HIP)
FP8_NORM_KERNEL(fp8_rms_norm_forward_held_bf16, BLOCKS, NormCodes<true>, norm_forward_held < gpu::type_bf16)
FP8_NORM_KERNEL(fp8_rms_norm_forward_held_f16, BLOCKS, NormCodes<true>, norm_forward_held < gpu::type_f16)
#endif
