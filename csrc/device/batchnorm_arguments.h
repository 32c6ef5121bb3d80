// Arguments of batch norm's kernels, by value: the host library and the bindings fill them in.
//
// Tensors are [batch][channels][spatial] or, channels last, [batch][channels] with what is spatial counted in batch.
// "Math" below is float, or double for double tensors.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 channel_threads = 448;  // of a block, at most: two of 512 would leave too few registers to each
constexpr u32 apply_threads = 256;    // likewise, of elementwise passes
constexpr u32 table_channels = 512;   // whose numbers a block of these keeps, at most

// Sums over all but the channels (channel_reduce.h). One launch: the last block of a channel, or of a column of
// channels, adds up what the others left.
struct ChannelReduce {
  const u8* input;
  const u8* grad_output;  // as the input; reduce_bn alone
  const u8* mean;         // [channels], Math; reduce_bn alone
  const u8* inv_std;      // likewise
  const u8* bitmask;      // as in ChannelApply; masked reduce_bn alone
  u8* sums;               // [2][channels], Math; welford_mean_var: and one more, the count
  u8* grad_weight;        // [channels], weight_type; or null
  u8* grad_bias;          // likewise
  u8* partials;           // [parts][3][channels], Math; if there is more than one part, and on a CPU
  u32* counters;          // zero, and zero again afterwards; one a channel or column of channels
  i64 batch, channels, spatial;
  i32 input_type, weight_type;
  i32 channels_last;
  u32 parts, threads;  // of the whole, of a block
  u32 width;           // elements of a vector
  // How much further a thread's next vector is: channels last, rows of all lanes; channels first, segments (one channel
  // of one image), and vectors if these are exact. wrap: what comes to it if it is in the segment after that.
  i64 step_bytes, wrap_bytes;
  // Channels first: vectors that a segment touches, vectors of a part, vectors that the next one is further.
  u32 segment_vectors, part_vectors, step_vectors;
  i32 exact;           // segments are whole vectors, of every tensor
  i32 same_alignment;  // a vector of the input is one of grad_output too
  // Channels last: vectors side by side in a block (a power of two), blocks side by side, rows of a part.
  u32 columns, column_blocks;
  i64 part_rows;
};

// One element in, one out (channel_apply.h).
struct ChannelApply {
  const u8* input;
  const u8* grad_output;  // as the input; backward
  const u8* z;            // as the input, added before the ReLU; or null
  const u8* mean;         // [channels], Math; or null: 0
  const u8* inv_std;      // likewise; or null: 1
  const u8* weight;       // [channels], weight_type; or null
  const u8* shift;        // likewise
  const u8* sum_dy;       // [channels], Math; or null: 0
  const u8* sum_dy_xmu;
  const u8* count;  // elements of a channel: `counts` numbers to add up
  u8* output;
  // groupbn alone: which outputs of the ReLU are positive (or nan), bit i % 8 of byte i / 8 for element i of memory; or
  // null: all. And the gradient of z, or null.
  u8* bitmask;
  u8* grad_z;
  i64 batch, channels, spatial;
  i32 input_type, weight_type;
  i32 channels_last;
  i32 count_is_int;  // i32 numbers, else Math
  i32 counts;
  i32 relu;
  // In memory's order: whether vectors of 16 bytes fit, how many (of the elements that a thread takes at once) a block
  // takes, and by how many elements, as channels and what is left of one, a thread's next one is further.
  i32 vectors;
  u32 part_vectors;
  u32 step_channels;  // modulo `channels`
  i64 step_spatial;
  // Channels last: as in ChannelReduce.
  u32 columns, column_blocks;
  i64 part_rows;
};

// Statistics of several ranks as one, running statistics, and what the forward needs of them.
struct WelfordParallel {
  const u8* mean;    // [ranks][channels], Math
  const u8* var;     // likewise, biased
  const u8* count;   // [ranks]
  u8* out_mean;      // [channels], Math
  u8* out_var;       // unbiased
  u8* out_inv_std;   // of the biased variance
  u8* out_count;     // [1], Math
  u8* running_mean;  // [channels], running_type; or null
  u8* running_var;
  const i64* batches;  // the running statistics are averages over so many batches; or null: `momentum` counts
  i64 ranks, channels;
  i64 mean_stride, var_stride, count_stride;  // elements from rank to rank
  double eps, momentum;
  i32 input_type;  // of the statistics: float or double
  i32 running_type;
  i32 count_is_int;  // i32 numbers, else Math
};
}  // namespace gpu
