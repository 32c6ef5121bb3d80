// Gradients of which several lie in the same memory. Autograd makes them: what comes into a.view(-1) + b.view(-1) goes
// on to a and b as two views of one tensor. Written in place, each would change twice.
#pragma once
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <vector>

#include "plain.h"

namespace apex {
// Gives each gradient of these tensors memory of its own; the first in memory keeps what they shared. One owner may be
// there twice. False, and nothing done, if one is a wrapper whose data is elsewhere.
inline bool separate_gradients(std::vector<at::Tensor>& owners) {
  struct Range {
    const c10::StorageImpl* storage;
    int64_t begin, end;  // bytes
    at::Tensor* owner;
    bool operator<(const Range& other) const {
      return storage != other.storage ? std::less<>()(storage, other.storage) : begin < other.begin;
    }
  };
  std::vector<Range> ranges;
  ranges.reserve(owners.size());
  for (at::Tensor& owner : owners) {
    const at::Tensor& gradient = owner.grad();
    if (!gradient.defined() || gradient.numel() == 0 || gradient.layout() != at::kStrided || gradient.is_meta() ||
        gradient._is_zerotensor())
      continue;
    if (!has_only(gradient, plain_keys | lazy_keys) || !gradient.has_storage()) return false;
    if (gradient.storage().use_count() == 1) continue;  // nothing else is in it
    const auto [begin, end] = range_of(gradient);
    ranges.push_back({gradient.storage().unsafeGetStorageImpl(), begin, end, &owner});
  }
  std::sort(ranges.begin(), ranges.end());
  const at::NoGradGuard no_grad;
  const Range* last = nullptr;
  for (const Range& range : ranges) {
    if (last && range.owner->is_same(*last->owner)) continue;
    if (last && range.storage == last->storage && range.begin < last->end)
      range.owner->mutable_grad() = range.owner->grad().clone();
    else last = &range;
  }
  return true;
}
}  // namespace apex
