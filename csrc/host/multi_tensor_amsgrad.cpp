#include "multi_tensor_amsgrad.h"

#include "host/multi_tensor_variants.h"

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_amsgrad, __VA_ARGS__)
static apex::MultiTensorVariant variants[] = {MULTI_TENSOR_AMSGRAD(VARIANT)};

extern "C" int32_t apex_multi_tensor_amsgrad(const apex_place* place, const apex_tensor_lists* lists,
                                             const gpu::AdamArguments* arguments, const apex_workspace* workspace) {
  gpu::AdamArguments a = *arguments;
  if (const int32_t status = apex::count_blocks(*place, *lists, workspace, &a)) return status;
  return apex::run_multi_tensor(variants, place, lists, &a);
}
