#include "multi_tensor_rmsprop.h"

#include "host/multi_tensor_variants.h"

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_rmsprop, __VA_ARGS__)
static apex::MultiTensorVariant variants[] = {MULTI_TENSOR_RMSPROP(VARIANT)};
static apex::MultiTensorVariant centered[] = {MULTI_TENSOR_RMSPROP_CENTERED(VARIANT)};

extern "C" int32_t apex_multi_tensor_rmsprop(const apex_place* place, const apex_tensor_lists* lists,
                                             const gpu::RmspropArguments* arguments) {
  return arguments->centered ? apex::run_multi_tensor(centered, place, lists, arguments)
                             : apex::run_multi_tensor(variants, place, lists, arguments);
}
