// A plan: how a set of tensor lists is laid out for multi-tensor launches.
//
// Building one sorts the tensors into buckets (one device and one combination of dtypes: one launch each) and
// cuts them into chunks. Each use checks every tensor against it and re-reads its address; nothing is ever
// launched on sizes that no longer hold.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "api.h"
#include "host/multi_tensor.h"

namespace apex {
// Tensor i of list k. An undefined tensor in list 0 is left out of this call (a parameter without gradient).
using TensorSource = std::function<const at::Tensor&(size_t list, size_t index)>;

class APEX_TORCH_API TensorPlan {
 public:
  // `names`: what error messages call each list. Bit k of `written`: the op writes list k.
  // Throws TypeError or ValueError, naming list and index, for tensors that cannot go together.
  TensorPlan(std::vector<std::string> names, uint32_t written, size_t tensors, const TensorSource& source);

  // Checks and re-reads all tensors. False: something but the addresses changed, build a new plan.
  bool refresh(const TensorSource& source);

  // One bucket for the op to launch on; `last` is set on the plan's last one.
  struct Launch {
    c10::Device device;
    apex_place place;
    apex_tensor_lists lists;
    bool last;
  };
  // Launches on every bucket; calls `reference` with the bucket's tensors where `launch` returns
  // APEX_USE_REFERENCE. `unit` names the device source. Counts the in-place writes in torch's versions.
  void run(const char* unit, const TensorSource& source, const std::function<int32_t(const Launch&)>& launch,
           const std::function<void(const std::vector<std::vector<at::Tensor>>&, bool last)>& reference);

  size_t tensors() const { return slots_.size(); }
  size_t buckets() const { return buckets_.size(); }

 private:
  struct Slot {  // one index of the lists
    int64_t numel;
    uint32_t bucket;
    uint32_t position;  // within the bucket
    std::vector<int64_t> strides;  // empty: contiguous
  };
  struct Table {  // one stream's copy of a bucket's image
    void* stream;
    at::Tensor memory;
    std::vector<uint64_t> image;
  };
  struct Bucket {
    c10::Device device;
    std::vector<int32_t> dtypes;
    std::vector<size_t> members;
    std::vector<uint64_t> image;
    uint32_t chunk_size;
    uint32_t chunks;
    std::vector<Table> tables;
  };

  void add(size_t index, const TensorSource& source);
  void lay_out(Bucket& bucket);
  bool fits(const Slot& slot, size_t list, const at::Tensor& tensor) const;
  const at::Tensor& with_layout_of(const Slot& slot, size_t index, const at::Tensor& gradient);
  void attach_table(const apex_place& place, Bucket& bucket, apex_tensor_lists& lists, at::Tensor& temporary);
  std::string describe(size_t list, size_t index) const;

  std::vector<std::string> names_;
  uint32_t written_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> copies_;  // gradients laid out like their parameters, until the next refresh
};

// Runs an op once on lists that the caller does not keep: plans are remembered by shape, not by tensor.
APEX_TORCH_API void run_once(
    const char* unit, const std::vector<std::string>& names, uint32_t written,
    const std::vector<at::TensorList>& lists, const std::function<int32_t(const TensorPlan::Launch&)>& launch,
    const std::function<void(const std::vector<std::vector<at::Tensor>>&, bool last)>& reference);
}  // namespace apex
