#include "norm.h"

#define KERNELS(...) NORM_ROWS_KERNELS(rms_norm, false, __VA_ARGS__)
NORM_ROWS(KERNELS)
#undef KERNELS
#define KERNELS(...) NORM_FEW_KERNELS(rms_norm, false, __VA_ARGS__)
NORM_FEW(KERNELS)
#undef KERNELS
#define KERNELS(...) NORM_LONG_KERNELS(rms_norm, false, __VA_ARGS__)
NORM_LONG(KERNELS)
#undef KERNELS
#define KERNELS(...) NORM_MATH_KERNELS(rms_norm, false, __VA_ARGS__)
NORM_MATH(KERNELS)
