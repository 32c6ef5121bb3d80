#include "multi_tensor_lamb_stage2.h"

#include "host/multi_tensor_variants.h"

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_lamb_stage2, __VA_ARGS__)
static apex::MultiTensorVariant variants[] = {MULTI_TENSOR_LAMB_STAGE2(VARIANT)};

extern "C" int32_t apex_multi_tensor_lamb_stage2(const apex_place* place, const apex_tensor_lists* lists,
                                                 const gpu::LambStage2Arguments* arguments) {
  return apex::run_multi_tensor(variants, place, lists, arguments);
}
