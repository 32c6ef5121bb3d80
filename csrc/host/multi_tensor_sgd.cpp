#include "multi_tensor_sgd.h"

#include "host/multi_tensor_unscale.h"

namespace gpu {
// The same number as the header has, without elements of 16 bits between: loops stay as wide as their registers. x is
// the result of a sum: a nan is quiet already.
template <> GPU_FN float SgdMomentum<float, bfloat16>::as_stored(float x) {
  const u32 u = bit_cast<u32>(x), up = x == x ? 0x7fffu + (u >> 16 & 1) : 0;
  return bit_cast<float>((u + up) & 0xffff0000u);
}
}  // namespace gpu

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_sgd, __VA_ARGS__)
static apex::MultiTensorVariant variants[] = {MULTI_TENSOR_SGD(VARIANT)};
static apex::MultiTensorVariant unscale[] = {MULTI_TENSOR_UNSCALE(VARIANT, SgdUnscale)};

extern "C" int32_t apex_multi_tensor_sgd(const apex_place* place, const apex_tensor_lists* lists,
                                         const gpu::SgdArguments* arguments) {
  return apex::run_and_unscale(variants, unscale, arguments->unscale_grads, place, lists, arguments);
}
