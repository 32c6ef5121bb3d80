// Philox4x32-10, the counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four
// random words from a key and a counter, the same on every device.
#pragma once
#include "gpu.h"

namespace gpu {
struct PhiloxWords { u32 v[4]; };

GPU_FN u64 wide_product(u32 a, u32 b) {
#if defined(GPU_CUDA)
  u64 product;  // one instruction; the compiler would add the nothing of a 64-bit product's other parts
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return (u64)a * b;
#endif
}

// A key's, for each round.
struct PhiloxKeys {
  u32 low[10], high[10];
  GPU_FN explicit PhiloxKeys(u64 key) {
    GPU_UNROLL_FOR (int round = 0; round < 10; ++round) {
      low[round] = (u32)key + (u32)round * 0x9e3779b9u;
      high[round] = (u32)(key >> 32) + (u32)round * 0xbb67ae85u;
    }
  }
};
GPU_FN PhiloxWords philox(const PhiloxKeys& keys, u64 counter) {
  PhiloxWords c{{(u32)counter, (u32)(counter >> 32), 0, 0}};
  GPU_UNROLL_FOR (int round = 0; round < 10; ++round) {
    const u64 a = wide_product(c.v[0], 0xd2511f53u), b = wide_product(c.v[2], 0xcd9e8d57u);
    c = PhiloxWords{
        {(u32)(b >> 32) ^ c.v[1] ^ keys.low[round], (u32)b, (u32)(a >> 32) ^ c.v[3] ^ keys.high[round], (u32)a}};
  }
  return c;
}
GPU_FN PhiloxWords philox(u64 key, u64 counter) { return philox(PhiloxKeys(key), counter); }

// Whether element i of a counter's eight is kept, with probability keep / 65536: half word i is below keep. Compared as
// the upper half of a word, which the odd ones are already.
GPU_FN bool philox_keeps(const PhiloxWords& words, int i, u32 keep) {
  const u32 word = i % 2 ? words.v[i / 2] : words.v[i / 2] << 16;
  return keep != 0 && word <= ((keep - 1) << 16 | 0xffffu);
}
// All eight: bit i is element i's.
GPU_FN u32 philox_keep_eight(u64 key, u64 counter, u32 keep) {
  const PhiloxWords words = philox(key, counter);
  u32 bits = 0;
  GPU_UNROLL_FOR (int i = 0; i < 8; ++i) bits |= (u32)philox_keeps(words, i, keep) << i;
  return bits;
}

// The same, keep / 2^32: half words are compared with keep / 65536, rounded down or up at random. What rounds is of the
// same numbers, and independent of each of them.
GPU_FN u32 philox_keep_eight_finely(u64 key, u64 counter, u32 keep) {
  const PhiloxWords words = philox(key, counter);
  const u32 rounds = (words.v[0] ^ words.v[1] ^ words.v[2] ^ words.v[3]) & 0xffffu;
  const u32 below = (keep >> 16) + (rounds < (keep & 0xffffu) ? 1 : 0);
  u32 bits = 0;
  GPU_UNROLL_FOR (int i = 0; i < 8; ++i) bits |= (u32)((words.v[i / 2] >> 16 * (i % 2) & 0xffffu) < below) << i;
  return bits;
}
}  // namespace gpu
