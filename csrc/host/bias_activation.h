#pragma once
#include "apex.h"
#include "device/bias_activation.h"

extern "C" APEX_EXPORT int32_t apex_bias_activation_forward(const apex_place* place,
                                                            const gpu::BiasActivation* arguments);
/* Fills in what the backward's launch needs, `parts` among it: `partials` must hold parts * columns floats (or doubles)
 * before the backward, unless grad_bias is null. `variant` goes from the one to the other: the choice may change. */
extern "C" APEX_EXPORT int32_t apex_bias_activation_prepare(const apex_place* place, gpu::BiasActivation* arguments,
                                                            int32_t* variant);
extern "C" APEX_EXPORT int32_t apex_bias_activation_backward(const apex_place* place,
                                                             const gpu::BiasActivation* arguments, int32_t variant);

namespace apex {
inline int64_t columns_of(const gpu::BiasActivation& a) { return a.gated ? 2 * a.hidden : a.hidden; }
void bias_activation_forward_cpu(const gpu::BiasActivation& a);
void bias_activation_backward_cpu(const gpu::BiasActivation& a);
}  // namespace apex
