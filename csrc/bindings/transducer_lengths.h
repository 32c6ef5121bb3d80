// Lengths of a batch's items, as the transducer's joint and loss take them.
#pragma once
#include <ATen/ops/zeros.h>

#include "checks.h"

namespace apex {
// One integer for each of so many items.
inline void check_lengths(const char* op, const char* name, const OptionalTensor& lengths, const c10::SymInt& items) {
  if (!has_value(lengths)) return;
  check_integers(op, name, *lengths);
  TORCH_CHECK_VALUE(lengths->dim() == 1 && lengths->sym_size(0) == items, op, ": ", name,
                    " has one element for each item of the batch, not the shape ", lengths->sym_sizes());
}
// `labels_name`: what the op calls the second ones.
inline void check_lengths(const char* op, const at::Tensor& frames, const char* labels_name, const at::Tensor& labels,
                          const OptionalTensor& batch_offset, const c10::SymInt& items) {
  check_lengths(op, "f_len", frames, items);
  check_lengths(op, labels_name, labels, items);
  check_lengths(op, "batch_offset", batch_offset, items);
}
// As the kernels take them; they must live as long as the arguments.
struct Lengths {
  at::Tensor of_frames, of_labels, batch_offset;
  template <class Arguments> Lengths(const at::Tensor& frames, const at::Tensor& labels, const OptionalTensor& offset,
                                     Arguments* a)
      : of_frames(frames.contiguous()), of_labels(labels.contiguous()) {
    if (frames.scalar_type() != labels.scalar_type())
      of_frames = of_frames.to(at::kLong), of_labels = of_labels.to(at::kLong);
    a->f_len = bytes(of_frames), a->g_len = bytes(of_labels), a->wide_lengths = of_frames.scalar_type() == at::kLong;
    if (!has_value(offset)) return;
    // Of no items it still says that rows are packed.
    batch_offset =
        offset->numel() ? offset->to(at::kLong).contiguous() : at::zeros({1}, offset->options().dtype(at::kLong));
    a->batch_offset = bytes(batch_offset);
  }
};
}  // namespace apex
