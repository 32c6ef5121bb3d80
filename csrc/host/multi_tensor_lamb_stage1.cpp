#include "multi_tensor_lamb_stage1.h"

#include "host/multi_tensor_variants.h"

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_lamb_stage1, __VA_ARGS__)
static apex::MultiTensorVariant variants[] = {MULTI_TENSOR_LAMB_STAGE1(VARIANT)};

extern "C" int32_t apex_multi_tensor_lamb_stage1(const apex_place* place, const apex_tensor_lists* lists,
                                                 const gpu::LambArguments* arguments) {
  return apex::run_multi_tensor(variants, place, lists, arguments);
}
