// Arguments of the cross-entropy kernels (xentropy.h), by value: the bindings fill them in.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 xentropy_threads = 512;
constexpr u32 xentropy_short_threads = 64;    // of a block of the `short` kernels (xentropy_short.h)
constexpr int xentropy_short_vectors = 4;     // of 16 bytes, that a lane of theirs has of a row, at most
constexpr i64 xentropy_ignored_label = -100;  // torch's ignore_index: ignored whatever the padding index is

struct XentropyForward {
  const u8* logits;               // [rows][classes], one row every row_stride elements
  const u8* labels;               // [rows], 64 bits each or 32
  u8* losses;                     // [rows], loss_type
  u8* normalizers;                // [rows][2]: the largest logit, and the sum of exp(logit - largest); float or double
  u8* partials;                   // [rows][splits][3], likewise; where splits > 1
  i64 rows, classes, row_stride;  // at most 2^31 - 1 classes
  i64 padding_index;
  double smoothing;
  i32 logits_type, loss_type, wide_labels, has_padding;
  i32 warp_rows;    // 1: a row is one warp's, 0: one block's or several blocks'
  i32 splits;       // blocks that share a row
  i32 rows_a_warp;  // of the `short` kernels
  i32 log_threads;  // of the `few` kernels: 2^log_threads share a row
};

struct XentropyBackward {
  const u8* grad_losses;  // [rows], grad_type, one every grad_stride elements (0: the same for all)
  const u8* logits;
  const u8* labels;
  const u8* normalizers;  // of the forward
  u8* grad_logits;        // [rows][classes], dense
  i64 rows, classes, row_stride, grad_stride;
  i64 padding_index;
  double smoothing;
  i32 logits_type, grad_type, wide_labels, has_padding;
  i32 warp_rows;  // as above
  i32 splits;
  i32 rows_a_warp, log_threads;
};
}  // namespace gpu
