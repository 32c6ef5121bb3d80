#include "optimizer_plan.h"

namespace apex {
OptimizerPlan::OptimizerPlan(std::vector<std::string> names, uint32_t written,
                             std::vector<std::vector<at::Tensor>> lists, std::vector<at::Tensor> owners,
                             std::vector<at::Tensor> watched)
    : names_(std::move(names)), written_(written), lists_(std::move(lists)), owners_(std::move(owners)),
      watched_(std::move(watched)) {
  TORCH_CHECK_VALUE(names_.size() == lists_.size() + 1, "one name a list, gradients first");
  for (size_t k = 0; k < lists_.size(); ++k)
    TORCH_CHECK_VALUE(lists_[k].size() == owners_.size(), names_[k + 1], " holds ", lists_[k].size(),
                      " tensors for the gradients of ", owners_.size());
  const auto note_types = [this](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) types_.push_back(tensor.scalar_type());
  };
  note_types(owners_);
  note_types(firsts());
}

TensorSource OptimizerPlan::source() const {
  TensorSource source;
  source.lists.reserve(names_.size());
  if (gradients_) {
    source.lists.push_back(*gradients_);
  } else {
    source.lists.emplace_back();
    source.gradients_of = owners_;
  }
  for (const auto& list : lists_) source.lists.push_back(list);
  return source;
}

bool OptimizerPlan::watched_has_gradient() const {
  for (const at::Tensor& parameter : watched_)
    if (parameter.grad().defined()) return true;
  return false;
}

bool OptimizerPlan::is_outdated() const {
  for (size_t i = 0; i < owners_.size(); ++i) {
    const at::Tensor& first = firsts()[i];
    if (owners_[i].scalar_type() != types_[i] || first.scalar_type() != types_[owners_.size() + i]) return true;
    const bool contiguous = first.is_contiguous();
    for (size_t k = 1; k < lists_.size(); ++k) {
      const at::Tensor& other = lists_[k][i];
      if (!other.defined()) continue;
      if (contiguous && other.is_contiguous()) continue;
      if (other.numel() > 1 && other.strides() != first.strides()) return true;
    }
  }
  return false;
}

void OptimizerPlan::set_gradients(std::optional<std::vector<at::Tensor>> gradients) {
  TORCH_CHECK_VALUE(!gradients || gradients->size() == owners_.size(),
                    "one gradient a parameter: ", gradients ? gradients->size() : 0, " for ", owners_.size());
  gradients_ = std::move(gradients);
}

void OptimizerPlan::run(const TensorPlan::Op& op) {
  if (owners_.empty()) return;
  const TensorSource tensors = source();
  if (plan_ && plan_->run(op, tensors)) return;
  plan_ = std::make_unique<TensorPlan>(names_, written_, owners_.size(), tensors);
  TORCH_CHECK_VALUE(plan_->run(op, tensors), op.unit, ": a tensor's layout cannot be used; make it contiguous");
}
}  // namespace apex
