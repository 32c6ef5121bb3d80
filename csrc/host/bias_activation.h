#pragma once
#include "apex.h"
#include "device/bias_activation.h"

extern "C" APEX_EXPORT int32_t apex_bias_activation_forward(const apex_place* place,
                                                            const gpu::BiasActivation* arguments);
extern "C" APEX_EXPORT int32_t apex_bias_activation_backward(const apex_place* place,
                                                             const gpu::BiasActivation* arguments,
                                                             const apex_workspace* workspace);

namespace apex {
inline int64_t columns_of(const gpu::BiasActivation& a) { return a.gated ? 2 * a.hidden : a.hidden; }
void bias_activation_forward_cpu(const gpu::BiasActivation& a);
void bias_activation_backward_cpu(const gpu::BiasActivation& a);
}  // namespace apex
