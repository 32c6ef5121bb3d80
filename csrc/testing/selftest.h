// Argument structs of selftest.cu.
#pragma once
#include "gpu.h"

struct SelftestTable {
  const gpu::u64* addresses;  // [count], each of `sizes[k]` floats
  const gpu::i64* sizes;      // [count]
  gpu::u32 count;
  gpu::u32 reserved;
};
