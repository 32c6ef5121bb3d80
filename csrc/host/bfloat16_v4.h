// bfloat16 in the registers of AVX512, as floats: what several loops of that level share.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>

#include "host/multi_tensor_tiles.h"

#define APEX_V4 __attribute__((target("arch=x86-64-v4,prefer-vector-width=512")))

namespace apex {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns of its own header
APEX_V4 APEX_INLINE __m512 widened_v4(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
// Of AVX512_BF16, whose instruction takes subnormal numbers for zero: whether it rounds these as from_float
// (gpu_host_numbers.h) does.
APEX_V4 APEX_INLINE bool rounds_exactly(__m512 low, __m512 high) {
  constexpr int subnormal = 0x20;
  return _kortestz_mask16_u8(_mm512_fpclass_ps_mask(low, subnormal), _mm512_fpclass_ps_mask(high, subnormal));
}
#pragma GCC diagnostic pop
}  // namespace apex
#endif
