// One float32 for each tensor of a call, in a tensor of as many elements: norms, decays.
#pragma once
#include <ATen/ops/tensor.h>

#include <optional>

#include "tensor_plan.h"

namespace apex {
// One float32 for each tensor of a call, as the buckets of a plan see it: each bucket's kernels number their own
// tensors from 0, so that a call of several buckets works on a copy.
class PerTensor {
 public:
  PerTensor(const std::optional<at::Tensor>& results, const TensorPlan::Launch& l, const char* name) {
    if (!results || !results->defined()) return;
    TORCH_CHECK_TYPE(results->scalar_type() == at::kFloat, name, " must be a float32 tensor, not ", results->scalar_type());
    TORCH_CHECK_VALUE(results->device() == l.device, name, " is on ", results->device(), " but the tensors are on ", l.device);
    TORCH_CHECK_VALUE(results->is_contiguous(), name, " must be contiguous");
    all_ = *results;
    TORCH_CHECK_VALUE(size_t(all_.numel()) == l.tensors, name, " holds ", all_.numel(), " elements for ", l.tensors, " tensors");
    if (l.first && l.last) {
      bucket_ = all_;
      return;
    }
    index_ = at::tensor(std::vector<int64_t>(l.members.begin(), l.members.end()), at::kLong).to(l.device);
    bucket_ = all_.index_select(0, index_);
  }
  float* pointer() const { return bucket_.defined() ? static_cast<float*>(bucket_.mutable_data_ptr()) : nullptr; }
  const at::Tensor& bucket() const { return bucket_; }
  // After the launch.
  void write_back() {
    if (index_.defined()) all_.index_copy_(0, index_, bucket_);
  }

 private:
  at::Tensor all_, bucket_, index_;
};
}  // namespace apex
