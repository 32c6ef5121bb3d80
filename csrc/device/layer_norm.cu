#include "norm.h"

#define KERNELS(...) NORM_ROWS_KERNELS(layer_norm, true, __VA_ARGS__)
NORM_ROWS(KERNELS)
#undef KERNELS
#define KERNELS(...) NORM_LONG_KERNELS(layer_norm, true, __VA_ARGS__)
NORM_LONG(KERNELS)
#undef KERNELS
#define KERNELS(...) NORM_MATH_KERNELS(layer_norm, true, __VA_ARGS__)
NORM_MATH(KERNELS)
