#pragma once
#include "generated/multi_tensor_adam.h"
#include "zeroed_counters.h"

namespace apex {
template <class Call> void check_adam(const Call& call) {
  check_betas(call);
  check_decay_mode(call);
  check_step(call);
}
template <class Call> int32_t launch_adam(const Call& call, const TensorPlan::Launch& l,
                                          int32_t (*run)(const apex_place*, const apex_tensor_lists*,
                                                         const gpu::AdamArguments*)) {
  // What a kernel (no other variant has a table) counts its blocks with where it advances the step.
  ZeroedCounters blocks_done;
  if (call.advance_step && l.last && l.lists.table) blocks_done = {l.place, l.device, 1, l.capturing};
  gpu::AdamArguments a = call.arguments(l);
  a.blocks_done = blocks_done.data();
  return run(&l.place, &l.lists, &a);
}

inline void MultiTensorAdam::check() const { check_adam(*this); }
inline int32_t MultiTensorAdam::launch(const TensorPlan::Launch& l) const {
  return launch_adam(*this, l, &apex_multi_tensor_adam);
}
}  // namespace apex
