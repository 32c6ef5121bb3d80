// The table that every multi-tensor kernel reads: which tensors, how large, cut into which chunks.
// Shared by device and host; no tensor count and no tensor size is limited by it.
#pragma once
#include "gpu.h"

namespace gpu {
// Passed by value; the arrays lie in device memory, one allocation (see csrc/host/multi_tensor.h).
struct TensorTable {
  const u64* addresses;    // [lists][tensors]; 0 in the first list: this tensor is left out of this call
  const i64* sizes;        // [tensors], in elements
  const u32* first_chunk;  // [tensors + 1]: chunks of all tensors before this one
  u32 tensors;
  u32 chunks;               // first_chunk[tensors]
  u32 chunk_size;           // elements
  u32 tensors_with_chunks;  // how many are not empty
};

// The words of a table travel inside kernel parameters: they are copied when a graph is captured, where a
// staging buffer would be read again, changed, at replay. 4 KB is the parameter limit of every driver.
constexpr u32 table_words_per_launch = 500;
struct TableWords {
  u64* destination;
  u32 count;
  u32 reserved;
  u64 words[table_words_per_launch];
};
}  // namespace gpu
