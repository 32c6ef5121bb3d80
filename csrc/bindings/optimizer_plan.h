// The plan that an optimizer keeps: parameters and their states, whose gradients are read anew at every step.
#pragma once
#include <memory>
#include <optional>
#include <variant>

#include "tensor_plan.h"

namespace apex {
class APEX_TORCH_API OptimizerPlan {
 public:
  // `names` begins with the gradients' name; `lists` holds the others: parameters first, then their states; none
  // where only gradients are read. `owners` are the tensors whose .grad are the gradients, `watched` parameters
  // that have no state yet. Bit k of `written`: the op writes list k (0: gradients). The last of two lists or more may
  // hold undefined tensors: those parameters are without.
  OptimizerPlan(std::vector<std::string> names, uint32_t written, std::vector<std::vector<at::Tensor>> lists,
                std::vector<at::Tensor> owners, std::vector<at::Tensor> watched);

  // Whether a watched parameter has received a gradient: its state is to be made, and a new plan.
  bool watched_has_gradient() const;

  // Whether a list's tensor no longer lies in memory as the first list's (its parameter's) does, or a parameter has
  // another dtype than it had: states and a new plan are to be made.
  bool is_outdated() const;

  // Gradients that are not the parameters' own .grad (local shards of a DTensor); none: .grad again.
  void set_gradients(std::optional<std::vector<at::Tensor>> gradients);

  void run(const TensorPlan::Op& op);

  // Of the last run; a bucket without elements needs none.
  size_t launches() const { return plan_ ? plan_->buckets_with_elements() : 0; }

 private:
  TensorSource source() const;
  const std::vector<at::Tensor>& firsts() const { return lists_.empty() ? owners_ : lists_[0]; }

  std::vector<std::string> names_;
  uint32_t written_;
  std::vector<std::vector<at::Tensor>> lists_;
  std::vector<at::Tensor> owners_, watched_;
  std::vector<at::ScalarType> types_;  // of owners, then of the first list, when the plan was made
  std::optional<std::vector<at::Tensor>> gradients_;
  std::unique_ptr<TensorPlan> plan_;
};

// What Python hands to an op over lists of tensors.
using Lists = std::vector<std::vector<at::Tensor>>;
using PlanOrLists = std::variant<OptimizerPlan*, Lists>;
}  // namespace apex
