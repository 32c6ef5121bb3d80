#include "multi_tensor_tiles.h"

#include "host/multi_tensor_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace apex {
namespace {
template <class T> inline __attribute__((always_inline)) void load_elements(float* x, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = gpu::to_float(from[i]);
}
template <class T> inline __attribute__((always_inline)) void store_elements(T* to, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) gpu::from_float(to[i], x[i]);
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
#define APEX_HALVES __attribute__((target("arch=x86-64-v3"))) void
APEX_HALVES load_halves(float* x, const void* elements, int64_t i, int64_t n) {
  const gpu::half* from = static_cast<const gpu::half*>(elements) + i;
  int64_t j = 0;
  for (; j + 8 <= n; j += 8)
    _mm256_storeu_ps(x + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j))));
  load_elements(x + j, from + j, n - j);
}
APEX_HALVES store_halves(void* elements, int64_t i, const float* x, int64_t n) {
  gpu::half* to = static_cast<gpu::half*>(elements) + i;
  int64_t j = 0;
  for (; j + 8 <= n; j += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + j), _MM_FROUND_TO_NEAREST_INT));
  store_elements(to + j, x + j, n - j);
}
#elif defined(__aarch64__)
void load_halves(float* x, const void* elements, int64_t i, int64_t n) {
  const gpu::half* from = static_cast<const gpu::half*>(elements) + i;
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) vst1q_f32(x + j, vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(from + j))));
  load_elements(x + j, from + j, n - j);
}
void store_halves(void* elements, int64_t i, const float* x, int64_t n) {
  gpu::half* to = static_cast<gpu::half*>(elements) + i;
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) vst1_f16(reinterpret_cast<float16_t*>(to + j), vcvt_f16_f32(vld1q_f32(x + j)));
  store_elements(to + j, x + j, n - j);
}
#endif

// In the order of apex_dtype.
#define FLOATS(number, load_half, store_half)                  \
  {{nullptr, load_half, load##number<gpu::bfloat16>, nullptr}, \
   {nullptr, store_half, store##number<gpu::bfloat16>, nullptr}},
}  // namespace

void copy_bytes(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); }
void clear_bytes(void* to, int64_t bytes) { std::memset(to, 0, size_t(bytes)); }

const TileConversions<float>& tile_conversions(int level, float) {
#if defined(__x86_64__)
  static constexpr TileConversions<float> by_level[] = {
      FLOATS(1, load1<gpu::half>, store1<gpu::half>) FLOATS(2, load2<gpu::half>, store2<gpu::half>)
          FLOATS(3, load_halves, store_halves) FLOATS(4, load_halves, store_halves)};
#elif defined(__aarch64__)
  static constexpr TileConversions<float> by_level[] = {FLOATS(1, load_halves, store_halves)
                                                            FLOATS(2, load_halves, store_halves)};
#else
  static constexpr TileConversions<float> by_level[] = {FLOATS(1, load1<gpu::half>, store1<gpu::half>)};
#endif
  return by_level[level - 1];
}
const TileConversions<double>& tile_conversions(int, double) {
  static constexpr TileConversions<double> conversions{{load_floats}, {store_floats}};  // APEX_F32 is 0
  return conversions;
}
}  // namespace apex
