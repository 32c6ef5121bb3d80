// Plans of lists that are passed anew at every call.
#include <list>
#include <memory>
#include <mutex>

#include "tensor_plan.h"

namespace apex {
namespace {
struct RememberedPlans {
  static constexpr size_t most = 64;
  std::mutex mutex;
  std::list<std::pair<uint64_t, std::unique_ptr<TensorPlan>>> plans;  // most recently used first

  // Taken out while in use: two threads never share one plan.
  std::unique_ptr<TensorPlan> take(uint64_t key) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto plan = plans.begin(); plan != plans.end(); ++plan)
      if (plan->first == key) {
        auto found = std::move(plan->second);
        plans.erase(plan);
        return found;
      }
    return nullptr;
  }
  void give(uint64_t key, std::unique_ptr<TensorPlan> plan) {
    std::lock_guard<std::mutex> lock(mutex);
    plans.emplace_front(key, std::move(plan));
    if (plans.size() > most) plans.pop_back();
  }
};

RememberedPlans& remembered() {
  // Never destroyed: at exit torch's allocator may be gone before this library.
  static auto* plans = new RememberedPlans;
  return *plans;
}

uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9e3779b97f4a7c15ull + (hash >> 29); }

uint64_t shape_key(const char* unit, uint32_t written, const std::vector<at::TensorList>& lists) {
  uint64_t hash = mix(reinterpret_cast<uint64_t>(unit), written);
  for (const at::TensorList& list : lists) {
    hash = mix(hash, list.size());
    for (const at::Tensor& tensor : list) {
      if (!tensor.defined()) continue;
      hash = mix(hash, uint64_t(tensor.numel()));
      hash = mix(hash, uint64_t(tensor.scalar_type()) << 16 | uint64_t(uint8_t(tensor.device().index())) << 8 |
                           uint64_t(uint8_t(tensor.device().type())));
    }
  }
  return hash;
}
}  // namespace

void run_once(const TensorPlan::Op& op, const std::vector<std::string>& names, uint32_t written,
              const std::vector<at::TensorList>& lists) {
  for (size_t k = 1; k < lists.size(); ++k)
    TORCH_CHECK_VALUE(lists[k].size() == lists[0].size(), op.unit, ": ", names[k], " holds ", lists[k].size(),
                      " tensors but ", names[0], " holds ", lists[0].size());
  if (lists.empty() || lists[0].empty()) return;
  const TensorSource source{lists, std::nullopt};
  const uint64_t key = shape_key(op.unit, written, lists);
  std::unique_ptr<TensorPlan> plan = remembered().take(key);
  if (!plan || plan->tensors() != lists[0].size() || !plan->run(op, source)) {
    plan = std::make_unique<TensorPlan>(names, written, lists[0].size(), source);
    TORCH_CHECK_VALUE(plan->run(op, source), op.unit, ": a tensor's layout cannot be used; pass contiguous tensors");
  }
  remembered().give(key, std::move(plan));
}
}  // namespace apex
