// Counters for a kernel whose last block ends the launch's work: zero before it, and zero again after it.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "host/memory.h"
#include "status.h"

namespace apex {
// For one launch on the place's stream; to be kept until that is queued.
class ZeroedCounters {
 public:
  ZeroedCounters() = default;
  ZeroedCounters(const apex_place& place, c10::Device device, int64_t count)
      : ZeroedCounters(place, device, count, apex_is_capturing(&place)) {}
  // `capturing`: what apex_is_capturing said.
  ZeroedCounters(const apex_place& place, c10::Device device, int64_t count, int32_t capturing) {
    if (capturing < 0) use_reference(-capturing, "zeroed_counters");
    use_reference(apex_counters(&place, capturing, size_t(count), &counters_), "zeroed_counters");
    if (counters_) return;
    // A graph zeroes these itself, at every replay.
    of_this_call_ = at::zeros({count}, at::TensorOptions().device(device).dtype(at::kInt));
    counters_ = static_cast<uint32_t*>(of_this_call_.mutable_data_ptr());
  }
  uint32_t* data() const { return counters_; }

 private:
  uint32_t* counters_ = nullptr;
  at::Tensor of_this_call_;
};
}  // namespace apex
