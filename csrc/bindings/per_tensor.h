// One number for each tensor of a call, in a float32 tensor that ops read and write on the device.
#pragma once
#include <ATen/ops/tensor.h>

#include <optional>

#include "tensor_plan.h"

namespace apex {
// As the buckets of a plan see it: each bucket's kernels number their own tensors from 0. Where a bucket's tensors
// stand side by side in the lists, its numbers do too; else they are copied out, and back after the launch.
class PerTensor {
 public:
  PerTensor(const std::optional<at::Tensor>& numbers, const TensorPlan::Launch& l, const char* name) {
    if (!numbers || !numbers->defined()) return;
    TORCH_CHECK_TYPE(numbers->scalar_type() == at::kFloat, name, " must be a float32 tensor, not ", numbers->scalar_type());
    TORCH_CHECK_VALUE(numbers->device() == l.device, name, " is on ", numbers->device(), " but the tensors are on ", l.device);
    TORCH_CHECK_VALUE(numbers->is_contiguous(), name, " must be contiguous");
    all_ = *numbers;
    TORCH_CHECK_VALUE(size_t(all_.numel()) == l.tensors, name, " holds ", all_.numel(), " elements for ", l.tensors, " tensors");
    const auto& members = l.members;
    if (members.size() == l.tensors || l.lists.check_only) {
      bucket_ = all_;
    } else if (members.empty() || members.back() - members.front() + 1 == members.size()) {
      bucket_ = all_.view(-1).narrow(0, members.empty() ? 0 : int64_t(members.front()), int64_t(members.size()));
    } else {
      index_ = at::tensor(std::vector<int64_t>(members.begin(), members.end()), at::kLong).to(l.device);
      bucket_ = all_.view(-1).index_select(0, index_);
    }
  }
  float* pointer() const { return bucket_.defined() ? static_cast<float*>(bucket_.mutable_data_ptr()) : nullptr; }
  const at::Tensor& bucket() const { return bucket_; }
  // Likewise, or nothing if no numbers were given.
  std::optional<at::Tensor> bucket_if_any() const { return bucket_.defined() ? std::optional<at::Tensor>(bucket_) : std::nullopt; }
  // After the launch.
  void write_back() {
    if (index_.defined()) all_.view(-1).index_copy_(0, index_, bucket_);
  }

 private:
  at::Tensor all_, bucket_, index_;
};
}  // namespace apex
