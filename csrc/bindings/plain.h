// The one place that knows when a tensor's bytes are its values: asked before any address is taken.
//
// torch's own ops find out by their dispatcher. Plans, and ops that are called past it, must ask; apex/_plain.py is the
// same for Python. A copy-on-write tensor is plain: read by const_data_ptr, written by mutable_data_ptr, which gives it
// memory of its own first.
#pragma once
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace apex {
// The keys of dense tensors with memory on a device, of autograd and of autocast. Whatever else a tensor has says that
// its values are elsewhere (wrapper, functional, batched, sparse, quantized, nested), or not what its bytes are.
constexpr c10::DispatchKeySet plain_keys =
    (c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask) |
     c10::DispatchKeySet(c10::DispatchKey::Dense) | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
     c10::autocast_dispatch_keyset)
        .remove_backend(c10::BackendComponent::MetaBit);
// Of views whose values a copy has.
constexpr c10::DispatchKeySet lazy_keys({c10::DispatchKey::Negative, c10::DispatchKey::Conjugate,
                                         c10::DispatchKey::ZeroTensor});

// A difference of two DispatchKeySets would leave the backends out.
inline bool has_only(const at::Tensor& tensor, c10::DispatchKeySet keys) {
  return (tensor.key_set().raw_repr() & ~keys.raw_repr()) == 0;
}
inline bool has_plain_keys(const at::Tensor& tensor) { return has_only(tensor, plain_keys); }

// A storage is without memory after resize_(0), as FSDP frees it.
inline bool is_freed(const at::Tensor& tensor) {
  return tensor.numel() > 0 && tensor.storage().unsafeGetStorageImpl()->data() == nullptr;
}
// Elements from a tensor's first to its last in memory; it has one.
inline int64_t extent_of(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.numel();
  int64_t extent = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
  return extent;
}
// Whether the storage holds all elements.
inline bool has_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  if (!tensor.has_storage() || is_freed(tensor)) return false;
  return tensor.storage().nbytes() >= size_t(tensor.storage_offset() + extent_of(tensor)) * tensor.itemsize();
}
// The bytes of its storage that a tensor lies in, from the first to behind the last; it has an element.
inline std::pair<int64_t, int64_t> range_of(const at::Tensor& tensor) {
  const int64_t size = tensor.itemsize(), begin = tensor.storage_offset() * size;
  return {begin, begin + extent_of(tensor) * size};
}
// Whether two tensors lie in one storage, in ranges that meet.
inline bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  if (one.numel() == 0 || other.numel() == 0 || !one.has_storage() || !other.has_storage()) return false;
  const auto [begin, end] = range_of(one);
  const auto [from, to] = range_of(other);
  return one.is_alias_of(other) && begin < to && from < end;
}
inline bool is_plain(const at::Tensor& tensor) { return has_plain_keys(tensor) && has_memory(tensor); }

// Whether a kernel can be given a copy in its place, which is copied back where it was written: torch cannot write a
// zero tensor.
inline bool has_plain_copy(const at::Tensor& tensor, bool written) {
  return has_only(tensor, plain_keys | lazy_keys) && has_memory(tensor) && !(written && tensor._is_zerotensor());
}

// Throws TypeError or ValueError, which `name` begins, for a tensor that is not plain.
inline void refuse_unless_plain(const at::Tensor& tensor, const std::string& name) {
  if (is_plain(tensor) && !tensor.is_complex()) return;
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, " is sparse (", tensor.layout(),
                   "): fused ops take dense tensors");
  TORCH_CHECK_TYPE(!tensor.is_quantized(), name, " is quantized: fused ops take plain numbers");
  TORCH_CHECK_TYPE(!tensor.is_complex(), name, " is ", tensor.scalar_type(), ": fused ops take real tensors");
  TORCH_CHECK_VALUE(!tensor.is_meta(), name, " is on the meta device: it has no data");
  TORCH_CHECK_TYPE(has_only(tensor, plain_keys | lazy_keys) && tensor.has_storage(), name,
                   " is a wrapper whose data is elsewhere (", tensor.toString(), "); pass its local tensor");
  TORCH_CHECK_VALUE(has_memory(tensor), name,
                    " has no memory: it was freed, or not allocated yet (FSDP frees that of "
                    "parameters after each use)");
  TORCH_CHECK_TYPE(false, name, " is a lazy view whose bytes are not its values (",
                   tensor.is_neg()    ? "negative"
                   : tensor.is_conj() ? "conjugate"
                                      : "zero",
                   "); pass ",
                   tensor.is_neg()    ? "torch.resolve_neg"
                   : tensor.is_conj() ? "torch.resolve_conj"
                                      : "torch.clone",
                   " of it");
}

// Throws ValueError for a tensor of which several elements share memory: what is written to one would be so to others.
inline void refuse_overlap(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, name, " overlaps itself (sizes ",
                    tensor.sizes(), ", strides ", tensor.strides(),
                    "): it cannot be written; pass a contiguous tensor");
}

// The memory of an output. `owner`: outputs of one owner may be one memory.
struct OutputRange {
  uint64_t begin, end;
  size_t list, index, owner;
};
// Throws ValueError where two outputs share memory: which value stays in it would be left to chance. describe(list,
// index) names an output.
template <class Describe>
void refuse_shared(std::vector<OutputRange> ranges, const Describe& describe, const std::string& op = "") {
  std::sort(ranges.begin(), ranges.end(), [](const OutputRange& a, const OutputRange& b) { return a.begin < b.begin; });
  for (size_t r = 1; r < ranges.size(); ++r) {
    const OutputRange &a = ranges[r - 1], &b = ranges[r];
    const bool one_memory = a.begin == b.begin && a.end == b.end && a.owner == b.owner;
    TORCH_CHECK_VALUE(a.end <= b.begin || one_memory, op, describe(a.list, a.index), " and ", describe(b.list, b.index),
                      " share memory: both are written");
  }
}

// In-place kernels are invisible to autograd: without this a stale saved tensor would go unnoticed.
inline void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}
}  // namespace apex
