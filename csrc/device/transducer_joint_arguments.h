// Arguments of the transducer joint's kernels (transducer_joint.h), by value: the bindings fill them in.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 joint_forward_threads = 256, joint_backward_threads = 256, joint_apart_threads = 64;
// What a thread of the forward adds up: labels that it holds, and frames.
constexpr u32 joint_tile_labels = 6;
template <bool dropout> constexpr u32 joint_tile_frames = dropout ? 4 : 2;
// What a thread of the forward adds up where rows begin anywhere (transducer_joint_staged.h): sums of a frame at once
// and the most of its columns. Vectors of a block's sums of a frame.
constexpr u32 joint_staged_sums = 16, joint_staged_most_columns = 4;
constexpr u32 joint_stage_vectors = joint_forward_threads * joint_staged_sums / 8 + 1;
// Columns of a thread, a power of two.
GPU_FN u32 joint_staged_columns(i64 hidden) {
  u32 columns = 1;
  while (columns < joint_staged_most_columns && columns * joint_forward_threads < hidden) columns *= 2;
  return columns;
}
// Labels that a warp holds sums of at once, in the backward: where rows are read in vectors, and where not, or in more
// than they have.
constexpr int joint_labels = 32, joint_labels_of_elements = 16, joint_labels_of_shifted = 16;

// Where a block holds all labels of an item (transducer_joint_held.h): threads; labels of a thread, and the most of a
// block; columns of a block; of CUDA, warps and labels of each; bytes of its shared memory, without and with ReLU's
// mask.
constexpr int joint_held_threads = 640, joint_held_labels = 4,
              joint_held_most_labels = joint_held_threads / 8 * joint_held_labels, joint_held_slab = 64,
              joint_held_warps = joint_held_threads / 32, joint_held_warp_labels = 4 * joint_held_labels;
constexpr int joint_held_shared_bytes = joint_held_threads * 128,
              joint_held_relu_shared_bytes = joint_held_threads * (128 + 64 + 32);

struct TransducerJointForward {
  const u8* f;             // [batch][frames][hidden]
  const u8* g;             // [batch][labels][hidden]
  const u8* f_len;         // [batch], 64 bits each or 32
  const u8* g_len;         // [batch], likewise
  const u8* batch_offset;  // [batch], i64: where the next item's rows begin; null: the output is not packed
  const u8* seed;          // one i64; null: no dropout
  u8* output;              // [rows][hidden]; not packed: rows = batch * frames * labels
  u8* mask;                // [rows][ceil(hidden / 8)]: bit i of byte j tells that column 8 j + i passes; with dropout
  i64 batch, frames, labels, hidden, rows;
  double scale;  // of what dropout keeps
  u32 keep;      // of 65536
  i32 type, wide_lengths, relu;
  i32 lanes;        // threads side by side on a row, a power of two
  i32 tile_frames;  // of a block, where rows begin anywhere
};

struct TransducerJointBackward {
  const u8* grad_output;  // [rows][hidden]
  const u8* f;            // where ReLU's mask is found again
  const u8* g;
  const u8* mask;  // of the forward
  const u8* f_len;
  const u8* g_len;
  const u8* batch_offset;
  u8* grad_f;    // [batch][frames][hidden]
  u8* grad_g;    // [batch][labels][hidden]
  u8* partials;  // [splits][batch][labels][hidden], float or double; where splits > 1
  u8* counters;  // [batch][slabs], u32, all 0 before and after; likewise
  i64 batch, frames, labels, hidden, rows;
  double scale;
  i32 type, wide_lengths;
  i32 splits;       // blocks that share an item's frames
  i32 tile_frames;  // frames of each
};
}  // namespace gpu
