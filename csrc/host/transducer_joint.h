// Launching the transducer joint, and its CPU variant: csrc/device/transducer_joint.h says what it computes.
#pragma once
#include "apex.h"
#include "device/transducer_joint_arguments.h"

extern "C" APEX_EXPORT int32_t apex_transducer_joint_forward(const apex_place* place,
                                                             const gpu::TransducerJointForward* arguments);
extern "C" APEX_EXPORT int32_t apex_transducer_joint_backward(const apex_place* place,
                                                              const gpu::TransducerJointBackward* arguments,
                                                              const apex_workspace* workspace);

namespace apex {
void transducer_joint_forward_cpu(const gpu::TransducerJointForward& a);
void transducer_joint_backward_cpu(const gpu::TransducerJointBackward& a);
}  // namespace apex
