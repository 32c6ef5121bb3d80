#include "multi_tensor_lars.h"

#include "host/multi_tensor_unscale.h"

#define NORMS(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_lars, norms_##name, __VA_ARGS__)
static apex::MultiTensorVariant norms[] = {MULTI_TENSOR_LARS_NORMS(NORMS)};
#define UPDATE(...) MULTI_TENSOR_VARIANT(multi_tensor_lars, __VA_ARGS__)
static apex::MultiTensorVariant updates[] = {MULTI_TENSOR_LARS(UPDATE)};
static apex::MultiTensorVariant unscale[] = {MULTI_TENSOR_UNSCALE(UPDATE, LarsUnscale)};

extern "C" int32_t apex_multi_tensor_lars(const apex_place* place, const apex_tensor_lists* lists,
                                          const gpu::LarsArguments* arguments) {
  gpu::LarsArguments a = *arguments;
  if (!a.is_skipped && !a.grad_norms && (lists->chunks > 0 || lists->check_only)) {
    const int32_t status = apex::run_multi_tensor(norms, place, lists, &a, 2);
    if (status != APEX_OK) return status;
    a.totals = apex::reduction_scratch(*lists, 2).totals;
    a.tensors = lists->tensors;
  }
  return apex::run_and_unscale(updates, unscale, a.unscale_grads, place, lists, &a);
}
