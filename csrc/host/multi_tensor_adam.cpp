#include "multi_tensor_adam.h"

#include "host/multi_tensor_unscale.h"

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_adam, __VA_ARGS__)
static apex::MultiTensorVariant variants[] = {MULTI_TENSOR_ADAM(VARIANT)};
static apex::MultiTensorVariant unscale[] = {MULTI_TENSOR_UNSCALE(VARIANT, AdamUnscale)};

extern "C" int32_t apex_multi_tensor_adam(const apex_place* place, const apex_tensor_lists* lists,
                                          const gpu::AdamArguments* arguments, const apex_workspace* workspace) {
  gpu::AdamArguments a = *arguments;
  if (const int32_t status = apex::count_blocks(*place, *lists, workspace, &a)) return status;
  return apex::run_and_unscale(variants, unscale, a.unscale_grads, place, lists, &a);
}
