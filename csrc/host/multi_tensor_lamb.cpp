#include "multi_tensor_lamb.h"

#include "host/multi_tensor_variants.h"

#define MOMENTS(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_lamb, moments_##name, LambMoments, __VA_ARGS__)
#define MOMENTS_MODEL(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_lamb, moments_##name, LambMomentsModel, __VA_ARGS__)
static apex::MultiTensorVariant moments[] = {MULTI_TENSOR_LAMB(MOMENTS) MULTI_TENSOR_LAMB_MODEL(MOMENTS_MODEL)};
#define APPLY(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_lamb, apply_##name, LambApply, __VA_ARGS__)
#define APPLY_MODEL(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_lamb, apply_##name, LambApplyModel, __VA_ARGS__)
static apex::MultiTensorVariant apply[] = {MULTI_TENSOR_LAMB(APPLY) MULTI_TENSOR_LAMB_MODEL(APPLY_MODEL)};

extern "C" int32_t apex_multi_tensor_lamb(const apex_place* place, const apex_tensor_lists* lists,
                                          const gpu::LambArguments* arguments) {
  gpu::LambArguments a = *arguments;
  const int32_t status = apex::run_multi_tensor(moments, place, lists, &a);
  if (status != APEX_OK) return status;
  a.totals = apex::reduction_scratch(*lists, 2).totals;
  a.tensors = lists->tensors;
  return apex::run_multi_tensor(apply, place, lists, &a);
}
