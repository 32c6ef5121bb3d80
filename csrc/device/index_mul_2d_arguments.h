// Arguments of the index_mul_2d kernels (index_mul_2d.h), by value: the bindings fill them in.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 index_mul_2d_threads = 256;

struct IndexMul2d {
  const u8* a;       // gather: [entries][features]; scatter: [rows][features]
  const u8* b;       // [rows][features]
  u8* out;           // gather: [rows][features]; scatter: [entries][features]
  const u8* index;   // gather: [rows], 64 bits each or 32
  const u8* order;   // scatter: [rows], i64: the rows by their index, those of one index in their own order
  const u8* begins;  // scatter: [entries + 1], i64: where in `order` an entry's rows begin
  i64 rows, entries, features;
  i32 type, wide_index;
  i32 in_vectors;  // every row begins at a multiple of 16 bytes
  i32 reserved;
};
}  // namespace gpu
