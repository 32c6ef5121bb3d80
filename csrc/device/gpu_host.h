// gpu.h for the CPU variants: the arithmetic alone. Loops over elements are csrc/host's.
#pragma once

#define GPU_HOST 1
#define GPU_WARP_SIZE 1
#define GPU_FN inline __attribute__((always_inline))
#define GPU_UNROLL_FOR for
#define GPU_ROLLED_FOR for
#include "gpu_host_numbers.h"
