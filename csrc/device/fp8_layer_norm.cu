// Layer norm to FP8 (norm_codes.h): one read of the input, one byte an element written.
#include "norm_to_fp8.h"

FP8_NORM_KERNELS(fp8_layer_norm, true)
