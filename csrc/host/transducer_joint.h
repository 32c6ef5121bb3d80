// Launching the transducer joint, and its CPU variant: csrc/device/transducer_joint.h says what it computes.
#pragma once
#include "apex.h"
#include "device/transducer_joint_arguments.h"

extern "C" APEX_EXPORT int32_t apex_transducer_joint_forward(const apex_place* place,
                                                             const gpu::TransducerJointForward* arguments);
/* Fills in what the launch needs. Where `splits` is more than 1 afterwards, `partials` must hold splits * batch *
 * labels * hidden floats (doubles of doubles) and `counters` batch * hidden zeros before
 * apex_transducer_joint_backward, which `variant` goes on to: the choice may change. */
extern "C" APEX_EXPORT int32_t apex_transducer_joint_prepare(const apex_place* place,
                                                             gpu::TransducerJointBackward* arguments, int32_t* variant);
extern "C" APEX_EXPORT int32_t apex_transducer_joint_backward(const apex_place* place,
                                                              const gpu::TransducerJointBackward* arguments,
                                                              int32_t variant);

namespace apex {
void transducer_joint_forward_cpu(const gpu::TransducerJointForward& a);
void transducer_joint_backward_cpu(const gpu::TransducerJointBackward& a);
}  // namespace apex
