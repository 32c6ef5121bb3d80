#include "norm.h"

#define KERNEL(name, types, width, vectors)                                                                        \
  NORM_KERNEL(layer_norm_forward_##name, NormForward, gpu::norm_forward_rows<true, types, width, vectors>)               \
  NORM_KERNEL(layer_norm_backward_##name, NormBackward, gpu::norm_backward_rows<true, types, width, vectors>)
NORM_ROWS(KERNEL)
#undef KERNEL
#define KERNEL(name, Math, width)                                                                             \
  NORM_KERNEL(layer_norm_forward_##name, NormForward, gpu::norm_forward_long<true, Math, width>)                  \
  NORM_KERNEL(layer_norm_backward_##name, NormBackward, gpu::norm_backward_long<true, Math, width>)
NORM_LONG(KERNEL)
#undef KERNEL
#define KERNEL(name, Math)                                                                                    \
  NORM_KERNEL(layer_norm_columns##name, NormBackward, gpu::norm_backward_columns<true, Math>)                     \
  NORM_KERNEL(layer_norm_finish##name, NormBackward, gpu::norm_backward_finish<true, Math>)
NORM_MATH(KERNEL)
