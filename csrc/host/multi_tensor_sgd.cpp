#include "multi_tensor_sgd.h"

#include "host/bfloat16_v4.h"
#include "host/cpu_level.h"
#include "host/multi_tensor_unscale.h"

namespace gpu {
// The same number as the header has, without elements of 16 bits between: loops stay as wide as their registers. x is
// the result of a sum: a nan is quiet already.
template <> GPU_FN float SgdMomentum<float, bfloat16>::as_stored(float x) {
  const u32 u = bit_cast<u32>(x), up = x == x ? 0x7fffu + (u >> 16 & 1) : 0;
  return bit_cast<float>((u + up) & 0xffff0000u);
}
}  // namespace gpu

#if defined(__x86_64__)
namespace apex {
// Gradient, parameter and buffer of bfloat16, where the processor rounds to it: all in registers, since tiles of floats
// would cost more than the arithmetic. The same bits as the operation's update() gives.
template <> struct CpuShortcut<gpu::SgdBf16MomentumUpdate<float>> {
  using Op = gpu::SgdBf16MomentumUpdate<float>;
  static constexpr int64_t block = 32;

  static int64_t run(int level, const Op& op, const int32_t* dtypes, const uint64_t* base, int64_t begin, int64_t end) {
    for (int k = 0; k < Op::lists; ++k)
      if (dtypes[k] != APEX_BF16) return begin;
    static const bool instruction = machine_has_bfloat16();
    if (level < 4 || !instruction || op.momentum == 0 || op.nesterov || op.first_run || !op.marked) return begin;
    return run_blocks(op, reinterpret_cast<const uint16_t*>(base[0]), reinterpret_cast<uint16_t*>(base[1]),
                      reinterpret_cast<uint16_t*>(base[2]), begin, end);
  }

 private:
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns of its own header
#define APEX_ROUNDS __attribute__((target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512")))
  // As gpu::fma on the host: two roundings, so that each level of the processor gives the same.
  static APEX_ROUNDS APEX_INLINE __m512 fma(__m512 a, __m512 b, __m512 c) {
    return _mm512_add_ps(_mm512_mul_ps(a, b), c);
  }
  static APEX_ROUNDS APEX_INLINE __m512 widened(const uint16_t* from) {
    return widened_v4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static APEX_ROUNDS int64_t run_blocks(const Op& op, const uint16_t* gradient, uint16_t* parameter, uint16_t* buffer,
                                        int64_t begin, int64_t end) {
    const __m512 scale = _mm512_set1_ps(op.scale), momentum = _mm512_set1_ps(op.momentum),
                 share = _mm512_set1_ps(op.gradient_share), minus_lr = _mm512_set1_ps(-op.lr),
                 decay_before = _mm512_set1_ps(op.decay_before), decay_after = _mm512_set1_ps(op.decay_after);
    const __m512i minus_zero = _mm512_set1_epi32(int(0x80000000u));
    for (int64_t i = begin; i + block <= end; i += block) {
      __m512 p[2], b[2];
      for (int k = 0; k < 2; ++k) {
        const int64_t at = i + 16 * k;
        p[k] = widened(parameter + at);
        const __m512 old = widened(buffer + at),
                     g = fma(decay_before, p[k], _mm512_mul_ps(widened(gradient + at), scale));
        const __mmask16 first = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(old), minus_zero);
        const __m512 gathered = fma(momentum, old, _mm512_mul_ps(share, g));
        b[k] = _mm512_add_ps(_mm512_mask_blend_ps(first, gathered, g), _mm512_setzero_ps());
      }
      if (!rounds_exactly(b[0], b[1])) return i;
      const auto stored = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b[1], b[0]));
      const __m256i halves[2] = {_mm512_castsi512_si256(stored), _mm512_extracti64x4_epi64(stored, 1)};
      for (int k = 0; k < 2; ++k) p[k] = fma(minus_lr, fma(decay_after, p[k], widened_v4(halves[k])), p[k]);
      if (!rounds_exactly(p[0], p[1])) return i;
      _mm512_storeu_si512(buffer + i, stored);
      _mm512_storeu_si512(parameter + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[1], p[0])));
    }
    return begin + (end - begin) / block * block;
  }
#undef APEX_ROUNDS
#pragma GCC diagnostic pop
};
}  // namespace apex
#endif

#define VARIANT(...) MULTI_TENSOR_VARIANT(multi_tensor_sgd, __VA_ARGS__)
static apex::MultiTensorVariant variants[] = {MULTI_TENSOR_SGD(VARIANT)};
static apex::MultiTensorVariant unscale[] = {MULTI_TENSOR_UNSCALE(VARIANT, SgdUnscale)};

extern "C" int32_t apex_multi_tensor_sgd(const apex_place* place, const apex_tensor_lists* lists,
                                         const gpu::SgdArguments* arguments) {
  return apex::run_and_unscale(variants, unscale, arguments->unscale_grads, place, lists, arguments);
}
