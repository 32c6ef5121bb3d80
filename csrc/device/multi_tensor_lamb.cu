#include "multi_tensor_lamb.h"

#define KERNELS(name, ...)                                                               \
  MULTI_TENSOR_REDUCE_KERNEL(multi_tensor_lamb_moments_##name, LambMoments, __VA_ARGS__) \
  MULTI_TENSOR_KERNEL(multi_tensor_lamb_apply_##name, LambApply, __VA_ARGS__)
MULTI_TENSOR_LAMB(KERNELS)
#undef KERNELS
#define KERNELS(name, ...)                                                                    \
  MULTI_TENSOR_REDUCE_KERNEL(multi_tensor_lamb_moments_##name, LambMomentsModel, __VA_ARGS__) \
  MULTI_TENSOR_KERNEL(multi_tensor_lamb_apply_##name, LambApplyModel, __VA_ARGS__)
MULTI_TENSOR_LAMB_MODEL(KERNELS)
