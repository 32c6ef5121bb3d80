#include "optimizer_plan.h"

#include <ATen/ops/zeros.h>

namespace apex {
OptimizerPlan::OptimizerPlan(std::vector<std::string> names, uint32_t written,
                             std::vector<std::vector<at::Tensor>> lists, std::vector<at::Tensor> watched,
                             size_t gradients_of)
    : names_(std::move(names)), written_(written), lists_(std::move(lists)), watched_(std::move(watched)), gradients_of_(gradients_of) {
  TORCH_CHECK_VALUE(names_.size() == lists_.size() + 1 && !lists_.empty(), "one name a list, gradients first");
  TORCH_CHECK_VALUE(gradients_of_ < lists_.size(), "gradients_of names no list: ", gradients_of_);
  for (size_t k = 0; k < lists_.size(); ++k)
    TORCH_CHECK_VALUE(lists_[k].size() == lists_[0].size(), names_[k + 1], " holds ", lists_[k].size(),
                      " tensors but ", names_[1], " holds ", lists_[0].size());
  source_ = [this](size_t list, size_t index) -> const at::Tensor& {
    if (list > 0) return lists_[list - 1][index];
    return gradients_ ? (*gradients_)[index] : lists_[gradients_of_][index].grad();
  };
}

bool OptimizerPlan::watched_has_gradient() const {
  for (const at::Tensor& parameter : watched_)
    if (parameter.grad().defined()) return true;
  return false;
}

void OptimizerPlan::set_gradients(std::optional<std::vector<at::Tensor>> gradients) {
  TORCH_CHECK_VALUE(!gradients || gradients->size() == lists_[0].size(), "one gradient a parameter: ",
                    gradients ? gradients->size() : 0, " for ", lists_[0].size());
  gradients_ = std::move(gradients);
}

void OptimizerPlan::run(const char* unit, const std::function<int32_t(const TensorPlan::Launch&)>& launch,
                        const std::function<void(const std::vector<std::vector<at::Tensor>>&, bool last)>& reference) {
  if (lists_[0].empty()) return;
  if (!plan_ || !plan_->refresh(source_)) {
    plan_ = std::make_unique<TensorPlan>(names_, written_, lists_[0].size(), source_);
    TORCH_CHECK_VALUE(plan_->refresh(source_), unit, ": a tensor's layout cannot be used; make it contiguous");
  }
  plan_->run(unit, source_, launch, reference);
}

at::Tensor OptimizerPlan::counter(c10::Device device) {
  for (const at::Tensor& counter : counters_)
    if (counter.device() == device) return counter;
  counters_.push_back(at::zeros({1}, at::TensorOptions().device(device).dtype(at::kInt)));
  return counters_.back();
}
}  // namespace apex
