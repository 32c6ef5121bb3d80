#pragma once
#include "device/multi_tensor_unscale.h"
#include "host/multi_tensor_variants.h"

namespace apex {
// An optimizer's last launch, then, if asked, the one that leaves gradients unscaled.
template <size_t N, size_t M>
int32_t run_and_unscale(MultiTensorVariant (&updates)[N], MultiTensorVariant (&unscale)[M], bool asked,
                        const apex_place* place, const apex_tensor_lists* lists, const void* arguments) {
  const int32_t status = run_multi_tensor(updates, place, lists, arguments);
  return status == APEX_OK && asked ? run_multi_tensor(unscale, place, lists, arguments, 1) : status;
}
}  // namespace apex
