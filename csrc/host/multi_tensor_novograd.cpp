#include "multi_tensor_novograd.h"

#include "host/multi_tensor_unscale.h"

#define NORM(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_novograd, norm_##name, NovogradNorm, __VA_ARGS__)
static apex::MultiTensorVariant norms[] = {MULTI_TENSOR_NOVOGRAD_NORMS(NORM)};
#define MAXIMUM(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_novograd, maximum_##name, NovogradMaximum, __VA_ARGS__)
static apex::MultiTensorVariant maxima[] = {MULTI_TENSOR_NOVOGRAD_NORMS(MAXIMUM)};
#define UPDATE(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_novograd, name, NovogradUpdate, __VA_ARGS__)
static apex::MultiTensorVariant updates[] = {MULTI_TENSOR_NOVOGRAD(UPDATE)};
#define UNSCALE(...) MULTI_TENSOR_VARIANT(multi_tensor_novograd, __VA_ARGS__)
static apex::MultiTensorVariant unscale[] = {MULTI_TENSOR_UNSCALE(UNSCALE, NovogradUnscale)};

extern "C" int32_t apex_multi_tensor_novograd(const apex_place* place, const apex_tensor_lists* lists,
                                              const gpu::NovogradArguments* arguments, int32_t maximum,
                                              int32_t update_norms) {
  if (lists->chunks == 0 && !lists->check_only) return APEX_OK;  // nothing to measure, no step to count
  gpu::NovogradArguments a = *arguments;
  if (update_norms) {
    a.gradients = reinterpret_cast<const gpu::u64*>(lists->table ? lists->table : lists->image);
    const int32_t status = maximum ? apex::run_multi_tensor(maxima, place, lists, &a, 1)
                                   : apex::run_multi_tensor(norms, place, lists, &a, 1);
    if (status != APEX_OK) return status;
    if (a.advance_step) a.step_offset = 0;
  }
  return apex::run_and_unscale(updates, unscale, a.unscale_grads, place, lists, &a);
}
