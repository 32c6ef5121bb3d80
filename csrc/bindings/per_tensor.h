// One number for each tensor of a call, in a float32 tensor that ops read and write on the device.
#pragma once
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>

#include <optional>

#include "plain.h"
#include "tensor_plan.h"

namespace apex {
// As the buckets of a plan see it: each bucket's kernels number their own tensors from 0. Where a bucket's tensors
// stand side by side in the lists, its numbers do too; else they are copied out, and back after the launch. Nothing
// comes from the host: a graph that is captured could not take it.
class PerTensor {
 public:
  PerTensor(const std::optional<at::Tensor>& numbers, const TensorPlan::Launch& l, const char* name) {
    if (!numbers || !numbers->defined()) return;
    TORCH_CHECK_TYPE(numbers->scalar_type() == at::kFloat, name, " must be a float32 tensor, not ",
                     numbers->scalar_type());
    TORCH_CHECK_VALUE(numbers->device() == l.device, name, " is on ", numbers->device(), " but the tensors are on ",
                      l.device);
    if (!is_plain(*numbers)) refuse_unless_plain(*numbers, name);
    TORCH_CHECK_VALUE(numbers->is_contiguous(), name, " must be contiguous");
    all_ = *numbers;
    TORCH_CHECK_VALUE(size_t(all_.numel()) == l.tensors, name, " holds ", all_.numel(), " elements for ", l.tensors,
                      " tensors");
    const auto& members = l.members;
    if (members.size() == l.tensors || l.lists.check_only) {
      bucket_ = all_;
      return;
    }
    const at::Tensor row = all_.view(-1);
    for (size_t first = 0, last; first < members.size(); first = last) {
      for (last = first + 1; last < members.size() && members[last] == members[last - 1] + 1;) ++last;
      runs_.push_back(row.narrow(0, int64_t(members[first]), int64_t(last - first)));
    }
    bucket_ = runs_.empty() ? row.narrow(0, 0, 0) : runs_.size() == 1 ? runs_[0] : at::cat(runs_);
  }
  const float* pointer() const {
    return bucket_.defined() ? static_cast<const float*>(bucket_.const_data_ptr()) : nullptr;
  }
  float* pointer_to_write() const {
    if (!bucket_.defined()) return nullptr;
    bump_version(all_);
    return static_cast<float*>(bucket_.mutable_data_ptr());
  }
  const at::Tensor& bucket() const { return bucket_; }
  // Likewise, or nothing if no numbers were given.
  std::optional<at::Tensor> bucket_if_any() const {
    return bucket_.defined() ? std::optional<at::Tensor>(bucket_) : std::nullopt;
  }
  // After the launch.
  void write_back() {
    if (runs_.size() < 2) return;
    std::vector<at::Tensor> numbers;
    int64_t first = 0;
    for (const at::Tensor& run : runs_) {
      numbers.push_back(bucket_.narrow(0, first, run.numel()));
      first += run.numel();
    }
    at::_foreach_copy_(runs_, numbers);
  }

 private:
  at::Tensor all_, bucket_;
  std::vector<at::Tensor> runs_;  // of all_: the bucket's, in order
};
}  // namespace apex
