#include "multi_tensor_l2norm.h"

#include "host/multi_tensor_variants.h"

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_l2norm, __VA_ARGS__)
static apex::MultiTensorVariant l2_variants[] = {MULTI_TENSOR_L2NORM(VARIANT)};
#undef VARIANT
#define VARIANT(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_l2norm, maximum_##name, __VA_ARGS__)
static apex::MultiTensorVariant maximum_variants[] = {MULTI_TENSOR_MAXIMUM_NORM(VARIANT)};

extern "C" int32_t apex_multi_tensor_l2norm(const apex_place* place, const apex_tensor_lists* lists,
                                            const gpu::NormArguments* arguments, int32_t maximum) {
  return maximum ? apex::run_multi_tensor(maximum_variants, place, lists, arguments)
                 : apex::run_multi_tensor(l2_variants, place, lists, arguments);
}
