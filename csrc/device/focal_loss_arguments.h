// Arguments of the focal loss's kernels (focal_loss.h), by value: the bindings fill them in.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 focal_loss_threads = 256;
constexpr i64 focal_loss_ignored = -2;  // the target of an example that does not count

struct FocalLoss {
  const u8* logits;         // [rows][classes]
  const u8* targets;        // [rows], 64 bits each or 32
  const u8* num_positives;  // one element, float or double as the arithmetic
  const u8* grad_loss;      // of the backward: likewise
  u8* result;               // forward: the loss, likewise; backward: the gradient of the logits
  u8* partials;             // forward: [blocks], likewise
  i64 rows, classes;
  i64 real_classes;  // those after them are padding
  double alpha, gamma, smoothing;
  i32 type, wide_targets;
  i32 blocks;      // of the forward
  i32 in_vectors;  // logits and gradient begin at multiples of 16 bytes
};
}  // namespace gpu
