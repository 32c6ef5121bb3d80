#include "multi_tensor_tiles.h"

#include <algorithm>
#include <limits>

#include "host/bfloat16_v4.h"
#include "host/cpu_level.h"
#include "host/multi_tensor_cpu.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace apex {
namespace {
// Where the block after [i, i + block) begins. The last one overlaps the one before: no rest is taken one by one.
APEX_INLINE int64_t next_block(int64_t i, int64_t block, int64_t n) {
  return i + block == n ? n : std::min(i + block, n - block);
}
template <class Each> APEX_INLINE void each_element(int64_t n, const Each& each) {
  constexpr int64_t block = 32;  // g++ unrolls loops of up to 16 before it could vectorise them
  if (n < block) {
    for (int64_t i = 0; i < n; ++i) each(i);
    return;
  }
  for (int64_t i = 0; i < n; i = next_block(i, block, n))
    for (int64_t l = 0; l < block; ++l) each(i + l);
}
template <class T> APEX_INLINE void load_elements(float* x, const T* from, int64_t n) {
  each_element(n, [&](int64_t i) APEX_INLINE_LAMBDA { x[i] = gpu::to_float(from[i]); });
}
template <class T> APEX_INLINE void store_elements(T* to, const float* x, int64_t n) {
  each_element(n, [&](int64_t i) APEX_INLINE_LAMBDA { gpu::from_float(to[i], x[i]); });
}

#define LEVEL(number, ...)                                                                                  \
  template <class T> __VA_ARGS__ void load##number(float* x, const void* elements, int64_t i, int64_t n) {  \
    load_elements(x, static_cast<const T*>(elements) + i, n);                                               \
  }                                                                                                         \
  template <class T> __VA_ARGS__ void store##number(void* elements, int64_t i, const float* x, int64_t n) { \
    store_elements(static_cast<T*>(elements) + i, x, n);                                                    \
  }
APEX_CPU_LEVELS(LEVEL)
#undef LEVEL

// Floats beside double arithmetic: rare, so not once a level.
void load_floats(double* x, const void* elements, int64_t i, int64_t n) {
  const float* from = static_cast<const float*>(elements) + i;
  for (int64_t j = 0; j < n; ++j) x[j] = from[j];
}
void store_floats(void* elements, int64_t i, const double* x, int64_t n) {
  float* to = static_cast<float*>(elements) + i;
  for (int64_t j = 0; j < n; ++j) to[j] = float(x[j]);
}

#if defined(__x86_64__)
// g++ does not find the instructions for halves by itself.
#define APEX_V3 __attribute__((target("arch=x86-64-v3")))
APEX_V3 void load_halves(float* x, const void* elements, int64_t i, int64_t n) {
  const gpu::half* from = static_cast<const gpu::half*>(elements) + i;
  if (n < 8) return load_elements(x, from, n);
  for (int64_t j = 0; j < n; j = next_block(j, 8, n))
    _mm256_storeu_ps(x + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j))));
}
APEX_V3 void store_halves(void* elements, int64_t i, const float* x, int64_t n) {
  gpu::half* to = static_cast<gpu::half*>(elements) + i;
  if (n < 8) return store_elements(to, x, n);
  for (int64_t j = 0; j < n; j = next_block(j, 8, n))
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + j), _MM_FROUND_TO_NEAREST_INT));
}

// bfloat16 as from_float (gpu_host_numbers.h) rounds it: a nan is made quiet by one bit.
APEX_V3 APEX_INLINE __m256i rounded_v3(const float* x) {
  const __m256 f = _mm256_loadu_ps(x);
  const __m256i u = _mm256_castps_si256(f), last = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1)),
                rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), last),
                quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000)),
                is_nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
APEX_V3 void store_bfloat16_v3(void* elements, int64_t i, const float* x, int64_t n) {
  gpu::bfloat16* to = static_cast<gpu::bfloat16*>(elements) + i;
  if (n < 16) return store_elements(to, x, n);
  for (int64_t j = 0; j < n; j = next_block(j, 16, n)) {
    const __m256i lanes_mixed = _mm256_packus_epi32(rounded_v3(x + j), rounded_v3(x + j + 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), _mm256_permute4x64_epi64(lanes_mixed, 0xd8));
  }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns of its own header
// Of the n elements that are left, those of a vector.
APEX_INLINE uint16_t mask_v4(int64_t n) { return n >= 16 ? uint16_t(0xffff) : uint16_t((1u << n) - 1); }
APEX_V4 APEX_INLINE void widen_v4(float* x, const gpu::bfloat16* from) {
  _mm512_storeu_ps(x, widened_v4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
constexpr int64_t prefetch_bytes = 1024;
APEX_V4 void load_bfloat16_v4(float* x, const void* elements, int64_t i, int64_t n) {
  const gpu::bfloat16* from = static_cast<const gpu::bfloat16*>(elements) + i;
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
    // What a later call will read, as a rule: a processor forgets a stream that pauses between tiles.
    _mm_prefetch(reinterpret_cast<const char*>(from + j) + prefetch_bytes, _MM_HINT_T0);
    widen_v4(x + j, from + j);
    widen_v4(x + j + 16, from + j + 16);
  }
  if (j + 16 <= n) widen_v4(x + j, from + j), j += 16;
  // The rest in the pieces in which loops read it: they would have to wait for what one masked store leaves.
  if (j + 8 <= n) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
    _mm256_storeu_ps(x + j, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
    j += 8;
  }
  for (; j < n; ++j) x[j] = gpu::to_float(from[j]);
}
APEX_V4 APEX_INLINE __m256i rounded_v4(__m512 f) {
  const __m512i u = _mm512_castps_si512(f), last = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1)),
                rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), last);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
  const __m512i made = _mm512_mask_or_epi32(rounded, is_nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(made, 16));
}
APEX_V4 APEX_INLINE void store_rounded_v4(gpu::bfloat16* to, const float* x, int64_t n) {
  int64_t j = 0;
  for (; j + 16 <= n; j += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), rounded_v4(_mm512_loadu_ps(x + j)));
  const uint16_t rest = mask_v4(n - j);
  if (rest) _mm256_mask_storeu_epi16(to + j, rest, rounded_v4(_mm512_maskz_loadu_ps(rest, x + j)));
}
APEX_V4 void store_bfloat16_v4(void* elements, int64_t i, const float* x, int64_t n) {
  store_rounded_v4(static_cast<gpu::bfloat16*>(elements) + i, x, n);
}
// Of processors with AVX512_BF16; as above where its instruction does not round exactly.
__attribute__((target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512"))) void store_bfloat16_v4_native(
    void* elements, int64_t i, const float* x, int64_t n) {
  gpu::bfloat16* to = static_cast<gpu::bfloat16*>(elements) + i;
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
    const __m512 low = _mm512_loadu_ps(x + j), high = _mm512_loadu_ps(x + j + 16);
    if (!rounds_exactly(low, high)) store_rounded_v4(to + j, x + j, 32);
    else _mm512_storeu_si512(to + j, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }
  store_rounded_v4(to + j, x + j, n - j);
}
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
void load_halves(float* x, const void* elements, int64_t i, int64_t n) {
  const gpu::half* from = static_cast<const gpu::half*>(elements) + i;
  if (n < 4) return load_elements(x, from, n);
  for (int64_t j = 0; j < n; j = next_block(j, 4, n))
    vst1q_f32(x + j, vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(from + j))));
}
void store_halves(void* elements, int64_t i, const float* x, int64_t n) {
  gpu::half* to = static_cast<gpu::half*>(elements) + i;
  if (n < 4) return store_elements(to, x, n);
  for (int64_t j = 0; j < n; j = next_block(j, 4, n))
    vst1_f16(reinterpret_cast<float16_t*>(to + j), vcvt_f16_f32(vld1q_f32(x + j)));
}
#endif

// In the order of apex_dtype.
#define FLOATS(load_half, store_half, load_bfloat16, store_bfloat16)                               \
  TileConversions<float> {                                                                         \
    {nullptr, load_half, load_bfloat16, nullptr}, { nullptr, store_half, store_bfloat16, nullptr } \
  }
#define OF_LEVEL(number) \
  FLOATS(load##number<gpu::half>, store##number<gpu::half>, load##number<gpu::bfloat16>, store##number<gpu::bfloat16>)
}  // namespace

const TileConversions<float>& tile_conversions(int level, float) {
#if defined(__x86_64__)
  static const TileConversions<float> by_level[] = {
      OF_LEVEL(1), OF_LEVEL(2), FLOATS(load_halves, store_halves, load3<gpu::bfloat16>, store_bfloat16_v3),
      FLOATS(load_halves, store_halves, load_bfloat16_v4,
             machine_has_bfloat16() ? store_bfloat16_v4_native : store_bfloat16_v4)};
#elif defined(__aarch64__)
  static constexpr TileConversions<float> by_level[] = {
      FLOATS(load_halves, store_halves, load1<gpu::bfloat16>, store1<gpu::bfloat16>),
      FLOATS(load_halves, store_halves, load2<gpu::bfloat16>, store2<gpu::bfloat16>)};
#else
  static constexpr TileConversions<float> by_level[] = {OF_LEVEL(1)};
#endif
  return by_level[level - 1];
}
#if defined(__x86_64__)
namespace {
// The wider, the fewer pieces of a line to be gathered.
void stream_v1(__m128i* to, const __m128i* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
}
APEX_V3 void stream_v3(__m256i* to, const __m256i* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes / 32; ++i) _mm256_stream_si256(to + i, _mm256_loadu_si256(from + i));
}
APEX_V4 void stream_v4(__m512i* to, const __m512i* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes / 64; ++i) _mm512_stream_si512(to + i, _mm512_loadu_si512(from + i));
}
}  // namespace
#endif
bool is_fetched(int64_t elements, int32_t type) {
  constexpr int64_t kept = int64_t{2} << 20;
  return elements * bytes_of(type) >= kept;
}
bool is_streamed(int64_t elements, int32_t type) {
#if defined(__x86_64__)
  constexpr int64_t kept = int64_t{8} << 20;  // a quarter of the third-level cache that a few cores share, as a rule
#else
  constexpr int64_t kept = std::numeric_limits<int64_t>::max();
#endif
  return elements * bytes_of(type) >= kept;
}
void stream_bytes(void* to, const void* from, int64_t bytes) {
#if defined(__x86_64__)
  constexpr int64_t line = 64;
  static const int level = machine_cpu_level();
  if ((reinterpret_cast<uintptr_t>(to) | uintptr_t(bytes)) % line == 0) {
    if (level >= 4) return stream_v4(static_cast<__m512i*>(to), static_cast<const __m512i*>(from), bytes);
    if (level == 3) return stream_v3(static_cast<__m256i*>(to), static_cast<const __m256i*>(from), bytes);
    return stream_v1(static_cast<__m128i*>(to), static_cast<const __m128i*>(from), bytes);
  }
#endif
  copy_bytes(to, from, bytes);
}
const TileConversions<double>& tile_conversions(int, double) {
  static constexpr TileConversions<double> conversions{{load_floats}, {store_floats}};  // APEX_F32 is 0
  return conversions;
}
}  // namespace apex
