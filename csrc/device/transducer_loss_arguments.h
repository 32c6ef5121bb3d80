// Arguments of the transducer loss's kernels (transducer_loss.h), by value: the bindings fill them in.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 transducer_loss_threads = 256, transducer_lattice_threads = 512;

struct TransducerLossForward {
  const u8* x;             // [batch][frames][labels][classes], or packed: [rows][classes]
  const u8* label;         // [batch][labels - 1]
  const u8* f_len;         // [batch], 64 bits each or 32
  const u8* g_len;         // [batch], likewise: labels of each item; its rows are one more
  const u8* batch_offset;  // [batch], i64: where the next item's rows begin; null: x is not packed
  u8* normalizers;         // [rows][2]: the largest x, log of the sum of exp(x - that); null: x are logarithms of
                           // probabilities
  u8* emissions;  // [batch][frames + labels - 1][labels][2]: log p of the blank and of the next label, by t + u
  u8* alpha;      // [batch][frames][labels][2]: a whole number and a rest
  u8* beta;       // likewise
  u8* loss;       // [batch], loss_type
  i64 batch, frames, labels, classes, rows, blank;
  i32 type, loss_type, wide_labels, wide_lengths;
  i32 log_lanes;  // 2^log_lanes threads share a row, at most a warp
  i32 tile_rows;  // rows that a warp takes together, one a lane at most
};

struct TransducerLossBackward {
  const u8* grad_loss;  // [batch], grad_type, one every grad_stride elements (0: the same for all)
  const u8* x;
  const u8* label;
  const u8* f_len;
  const u8* g_len;
  const u8* batch_offset;
  const u8* normalizers;  // null: x are logarithms of probabilities
  const u8* alpha;
  const u8* beta;
  u8* grad_x;  // as x
  i64 batch, frames, labels, classes, rows, blank, grad_stride;
  i32 type, grad_type, wide_labels, wide_lengths;
  i32 tile_rows;  // as above
  i32 of_logits;  // the gradient goes through the softmax; 0: it is that of the logarithms
};
}  // namespace gpu
