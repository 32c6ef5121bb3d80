// The joint's dropout: which of eight sums pass, and what becomes of them.
#pragma once
#include "exchange.h"
#include "philox.h"

namespace gpu {
#if !defined(GPU_HOST)
// The keys of all rounds stay in registers: added up again for every eight sums they would be a tenth of the work.
GPU_FN PhiloxKeys held_keys(u64 key) {
  PhiloxKeys keys(key);
  GPU_UNROLL_FOR (int round = 0; round < 10; ++round) {
    keys.low[round] = pinned(keys.low[round]);
    keys.high[round] = pinned(keys.high[round]);
  }
  return keys;
}

// Those that are kept, with probability keep / 65536, and not at or below `limit` (a nan is not, nor is anything below
// a nan) are scaled; the others become 0. Returns bits: bit i tells that x[i] passes.
template <class Math> GPU_FN u32 drop_eight(Math (&x)[8], const PhiloxWords& words, u32 keep, Math limit, Math scale) {
  u32 bits = 0;
  GPU_UNROLL_FOR (int i = 0; i < 8; ++i) {
    const bool passes = philox_keeps(words, i, keep) && !(x[i] <= limit);
    bits |= (u32)passes << i;
    x[i] = passes ? x[i] * scale : Math(0);
  }
  return bits;
}
#if defined(GPU_CUDA)
// The same. The integer units are the busiest here, so bits are added up as floats: above 2^23, 2^i is bit i.
template <> GPU_FN u32 drop_eight<float>(float (&x)[8], const PhiloxWords& words, u32 keep, float limit, float scale) {
  float bits = 8388608.0f;
#define DROP_ONE(at, word, power)    \
  "setp.le.and.u32 passes, " word    \
  ", %14, some;\n\t"                 \
  "setp.gtu.and.f32 passes, %" at    \
  ", %15, passes;\n\t"               \
  "@passes add.f32 %8, %8, 0f" power \
  ";\n\t"                            \
  "mul.f32 %" at ", %" at            \
  ", %16;\n\t"                       \
  "@!passes mov.f32 %" at ", 0f00000000;\n\t"
#define DROP_TWO(even, odd, word, power_even, power_odd) \
  "shl.b32 low, " word ", 16;\n\t" DROP_ONE(even, "low", power_even) DROP_ONE(odd, word, power_odd)
  asm("{\n\t.reg .pred some, passes;\n\t.reg .u32 low;\n\tsetp.ne.u32 some, %13, 0;\n\t"  //
      DROP_TWO("0", "1", "%9", "3f800000", "40000000")                                    //
      DROP_TWO("2", "3", "%10", "40800000", "41000000")                                   //
      DROP_TWO("4", "5", "%11", "41800000", "42000000")                                   //
      DROP_TWO("6", "7", "%12", "42800000", "43000000") "}"
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]), "+f"(bits)
      : "r"(words.v[0]), "r"(words.v[1]), "r"(words.v[2]), "r"(words.v[3]), "r"(keep), "r"((keep - 1) << 16 | 0xffffu),
        "f"(limit), "f"(scale));
#undef DROP_TWO
#undef DROP_ONE
  return bit_cast<u32>(bits) & 0xffu;
}
#endif
#endif
}  // namespace gpu
