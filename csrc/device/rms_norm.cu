#include "norm.h"

#define KERNEL(name, types, width, vectors)                                                                        \
  NORM_KERNEL(rms_norm_forward_##name, NormForward, gpu::norm_forward_rows<false, types, width, vectors>)               \
  NORM_KERNEL(rms_norm_backward_##name, NormBackward, gpu::norm_backward_rows<false, types, width, vectors>)
NORM_ROWS(KERNEL)
#undef KERNEL
#define KERNEL(name, Math, width)                                                                             \
  NORM_KERNEL(rms_norm_forward_##name, NormForward, gpu::norm_forward_long<false, Math, width>)                  \
  NORM_KERNEL(rms_norm_backward_##name, NormBackward, gpu::norm_backward_long<false, Math, width>)
NORM_LONG(KERNEL)
#undef KERNEL
#define KERNEL(name, Math)                                                                                    \
  NORM_KERNEL(rms_norm_columns##name, NormBackward, gpu::norm_backward_columns<false, Math>)                     \
  NORM_KERNEL(rms_norm_finish##name, NormBackward, gpu::norm_backward_finish<false, Math>)
NORM_MATH(KERNEL)
