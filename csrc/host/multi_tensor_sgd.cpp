#include "multi_tensor_sgd.h"

#include "host/multi_tensor_unscale.h"

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_sgd, __VA_ARGS__)
static apex::MultiTensorVariant variants[] = {MULTI_TENSOR_SGD(VARIANT)};
static apex::MultiTensorVariant unscale[] = {MULTI_TENSOR_UNSCALE(VARIANT, SgdUnscale)};

extern "C" int32_t apex_multi_tensor_sgd(const apex_place* place, const apex_tensor_lists* lists,
                                         const gpu::SgdArguments* arguments) {
  return apex::run_and_unscale(variants, unscale, arguments->unscale_grads, place, lists, arguments);
}
