// Launching the transducer loss, and its CPU variant: csrc/device/transducer_loss.h says what it computes.
#pragma once
#include "apex.h"
#include "device/transducer_loss_arguments.h"

/* All tensors of the arguments but `emissions`, which the workspace holds, must be there. */
extern "C" APEX_EXPORT int32_t apex_transducer_loss_forward(const apex_place* place,
                                                            const gpu::TransducerLossForward* arguments,
                                                            const apex_workspace* workspace);
extern "C" APEX_EXPORT int32_t apex_transducer_loss_backward(const apex_place* place,
                                                             const gpu::TransducerLossBackward* arguments);

namespace apex {
void transducer_loss_forward_cpu(const gpu::TransducerLossForward& a);
void transducer_loss_backward_cpu(const gpu::TransducerLossBackward& a);
}  // namespace apex
