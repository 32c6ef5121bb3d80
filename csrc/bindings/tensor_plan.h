// A plan: how a set of tensor lists is laid out for multi-tensor launches.
//
// Building one sorts the tensors into buckets (one device and one combination of dtypes: one launch each) and
// cuts them into chunks. Each use checks every tensor against it and re-reads its address; nothing is ever
// launched on sizes that no longer hold.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "api.h"
#include "host/multi_tensor.h"
#include "stream_memory.h"

namespace apex {
// Tensor i of list k. An undefined tensor in list 0 is left out of this call (a parameter without gradient). One in
// the last list (of three or more) is none that the op needs there: a parameter without model copy.
struct TensorSource {
  std::vector<at::TensorList> lists;
  // Given: list 0 is these tensors' .grad, read anew each time, and lists[0] is empty.
  std::optional<at::TensorList> gradients_of;

  const at::Tensor& operator()(size_t list, size_t index) const {
    return list == 0 && gradients_of ? (*gradients_of)[index].grad() : lists[list][index];
  }
  // A tensor of the index's size and device that is always there: list 1's, or what the gradient belongs to.
  const at::Tensor& model(size_t index) const {
    if (lists.size() > 1) return lists[1][index];
    return gradients_of ? (*gradients_of)[index] : lists[0][index];
  }
};

class APEX_TORCH_API TensorPlan {
 public:
  // `names`: what error messages call each list. Bit k of `written`: the op writes list k.
  // Throws TypeError or ValueError, naming list and index, for tensors that cannot go together.
  TensorPlan(std::vector<std::string> names, uint32_t written, size_t tensors, const TensorSource& source);

  // One bucket for the op to launch on.
  struct Launch {
    c10::Device device;
    apex_place place;
    apex_tensor_lists lists;
    bool first, last;                    // of the plan's buckets
    const std::vector<size_t>& members;  // which indices of the lists the bucket holds; for a reference: its tensors'
    size_t tensors;                      // how many indices the lists have
    int32_t capturing = 0;               // apex_is_capturing of the place
  };
  using Launcher = std::function<int32_t(const Launch&)>;
  using Tensors = std::vector<std::vector<at::Tensor>>;
  using Reference = std::function<void(const Tensors&, const Launch&)>;
  // What an op does on every bucket.
  struct Op {
    const char* unit;                // its device source
    uint32_t reductions;             // how many quantities its kernels reduce
    Launcher launch;                 // is also called, with lists.check_only, to see whether a bucket could be taken
    Reference reference;             // called with the bucket's tensors where `launch` returns APEX_USE_REFERENCE
    bool gradients_written = false;  // this call writes list 0, although the plan's `written` does not say so
  };
  // Checks and re-reads all tensors, runs the op on every bucket, and counts its in-place writes in torch's version
  // counters. False, and nothing done: something but the addresses changed, build a new plan.
  bool run(const Op& op, const TensorSource& source);

  size_t tensors() const { return slots_.size(); }
  size_t buckets_with_elements() const;

 private:
  struct Slot {  // one index of the lists
    int64_t numel;
    uint32_t bucket;
    uint32_t position;             // within the bucket
    std::vector<int64_t> strides;  // empty: contiguous
  };
  struct Kept {  // one stream's memory of a bucket
    void* stream;
    uint32_t reductions;  // that it is the scratch of; 0: it is the table
    StreamMemory memory;
    std::vector<uint64_t> image;  // what the table holds
  };
  struct Copy {  // what a kernel is given in the place of a tensor, for one call
    size_t list, index;
    at::Tensor tensor;
  };
  struct Call {
    const Op& op;
    const TensorSource& source;
    uint32_t written;  // bit k: this call writes list k
    std::vector<Copy> copies;
    bool writes(size_t list) const { return written >> list & 1; }
    const at::Tensor& given(size_t list, size_t index) const;
  };
  struct Bucket {
    c10::Device device;
    std::vector<int32_t> dtypes;
    std::vector<size_t> members;
    std::vector<uint64_t> image;
    uint32_t chunk_size;
    uint32_t chunks;
    uint32_t tensors_with_chunks;
    std::vector<Kept> kept;
  };

  void add(size_t index, const TensorSource& source);
  void lay_out(Bucket& bucket);
  bool refresh(Call& call);
  bool is_output(const Call& call, size_t list) const;
  void refuse_shared_outputs(const Call& call) const;
  bool fits(const Slot& slot, size_t list, const at::Tensor& tensor) const;
  bool may_copy(const Call& call, size_t list, const at::Tensor& tensor) const;
  const at::Tensor& copy_for(Call& call, const Slot& slot, size_t list, size_t index) const;
  // Null: no memory may be kept for the place now, so what is attached is the call's own.
  Kept* kept_for(const apex_place& place, Bucket& bucket, uint32_t reductions, size_t bytes);
  // False: the table cannot be written here, so the reference must run.
  bool attach_table(const apex_place& place, Bucket& bucket, bool capturing, apex_tensor_lists& lists,
                    at::Tensor& temporary);
  void attach_scratch(const apex_place& place, Bucket& bucket, bool capturing, uint32_t reductions,
                      apex_tensor_lists& lists, at::Tensor& temporary);
  void give_back(const Bucket& bucket, const Call& call) const;
  Launch launch_on(size_t turn) const;
  void check_buckets(const Op& op);
  void run_bucket(const Call& call, size_t turn);
  void run_reference(const Call& call, const Bucket& bucket, const Launch& l);
  void bump_versions(const Call& call) const;
  std::string describe(size_t list, size_t index) const;
  std::string describe_model(size_t index) const;

  std::vector<std::string> names_;
  uint32_t written_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> order_;  // in which they are launched
  bool spans_devices_ = false;
  bool outputs_are_apart_ = false;     // of the addresses that the image holds
  const char* checked_for_ = nullptr;  // the unit that is known to take every bucket
};

// Runs an op once on lists that the caller does not keep: plans are remembered by shape, not by tensor.
APEX_TORCH_API void run_once(const TensorPlan::Op& op, const std::vector<std::string>& names, uint32_t written,
                             const std::vector<at::TensorList>& lists);
}  // namespace apex
