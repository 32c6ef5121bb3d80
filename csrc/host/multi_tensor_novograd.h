#pragma once
#include "device/multi_tensor_novograd.h"
#include "host/multi_tensor.h"

/* Lists: gradients, parameters, exp_avgs. One reduction. `maximum`: norms are largest magnitudes, not L2.
 * `update_norms` 0: the averaged norms are taken as they are, and the first launch left out. */
extern "C" APEX_EXPORT int32_t apex_multi_tensor_novograd(const apex_place* place, const apex_tensor_lists* lists,
                                                          const gpu::NovogradArguments* arguments, int32_t maximum,
                                                          int32_t update_norms);
