// Counters for kernels whose last block ends the launch's work: zero before it, and zero again after it.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <mutex>
#include <tuple>

#include "host/apex.h"
#include "status.h"

namespace apex {
// At least `count` of them, for work that is queued on the place's stream now. They are made once a stream, where
// launches follow each other. A launch that is captured gets some that no other has, since its graph may be replayed
// beside anything: from a store that was zeroed before, else zeroed by the graph at every replay.
inline at::Tensor zeroed_counters(const apex_place& place, c10::Device device, int64_t count) {
  struct Store {
    at::Tensor memory;
    int64_t used = 0;
  };
  constexpr int64_t at_least = 4096, of_store = 1 << 16, aligned = 32;
  const auto make = [&](int64_t n) { return at::zeros({n}, at::TensorOptions().device(device).dtype(at::kInt)); };
  const int32_t capturing = apex_is_capturing(&place);
  if (capturing < 0) use_reference(-capturing, "zeroed_counters");
  // Never destroyed: at exit the allocators are gone.
  static auto& by_stream = *new std::map<std::tuple<int32_t, int32_t, void*>, at::Tensor>;
  static auto& by_device = *new std::map<std::pair<int32_t, int32_t>, Store>;
  static std::mutex lock;
  const std::lock_guard<std::mutex> guard(lock);
  Store& store = by_device[{place.platform, place.device}];
  if (capturing) {
    if (!store.memory.defined() || store.used + count > of_store) return make(count);
    const at::Tensor counters = store.memory.narrow(0, store.used, count);
    store.used += (count + aligned - 1) / aligned * aligned;
    return counters;
  }
  if (!store.memory.defined()) store.memory = make(of_store);
  at::Tensor& counters = by_stream[{place.platform, place.device, place.stream}];
  if (!counters.defined() || counters.numel() < count) counters = make(count < at_least ? at_least : 2 * count);
  return counters;
}
}  // namespace apex
