// The CPU variant of rotary positional embedding, at each x86-64 level: heads in tiles that stay in the first-level
// cache.
#include <algorithm>

#include "multi_tensor_cpu.h"
#include "rope.h"

namespace apex {
namespace {
// Units are positions, or positions and batches where positions are few.
template <class Math> struct Turn {
  const gpu::Rope& a;
  int64_t parts;  // of the batch
  bool fits;      // cu_seqlens make sense

  // Elements [k, k + n) of a head that begins at `from`; in place where they lie there as arithmetic sees them.
  APEX_INLINE const Math* load(const TileConversions<Math>& convert, int64_t from, int64_t k, int64_t n,
                               Math* buffer) const {
    if (a.in_element == 1) {
      if (a.type == DtypeOf<Math>::value) return reinterpret_cast<const Math*>(a.input) + from + k;
      convert.load[a.type](buffer, a.input, from + k, n);
    } else {
      for (int64_t j = 0; j < n; ++j) {
        Math x[1];
        gpu::load_values(x, a.input, a.type, from + (k + j) * a.in_element);
        buffer[j] = x[0];
      }
    }
    return buffer;
  }
  APEX_INLINE void store(const TileConversions<Math>& convert, int64_t i, const Math* x, int64_t n) const {
    if (a.type == DtypeOf<Math>::value) std::copy(x, x + n, reinterpret_cast<Math*>(a.output) + i);
    else convert.store[a.type](a.output, i, x, n);
  }
  APEX_INLINE int64_t packed_row(int64_t place) const {
    if (!fits) return gpu::rope_wrong;
    if (place >= a.cu_seqlens[a.sequences]) return gpu::rope_unturned;
    return gpu::rope_row(a, place, *(std::upper_bound(a.cu_seqlens, a.cu_seqlens + a.sequences, place) - 1));
  }
  template <class Body> APEX_INLINE void each_head(int64_t y, int64_t x, int64_t part, const Body& body) const {
    for (int64_t b = a.batch * part / parts; b < a.batch * (part + 1) / parts; ++b)
      for (int64_t h = 0; h < a.heads; ++h)
        body(y * a.in_y + x * a.in_x + b * a.in_batch + h * a.in_head,
             y * a.out_y + x * a.out_x + b * a.out_batch + h * a.out_head);
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math cos_low[tile], cos_high[tile], sin_low[tile], sin_high[tile], first[tile], second[tile], low[tile],
        high[tile];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t place = unit / parts, part = unit % parts, y = place / a.width, x = place % a.width;
      const int64_t row = a.cu_seqlens ? packed_row(place) : a.groups == 2 ? y : x;
      const int64_t half = a.rotary / 2;
      const int64_t turned = row == gpu::rope_unturned ? 0 : int64_t(a.groups) * a.rotary;
      for (int64_t group = 0; group * a.rotary < turned; ++group)
        for (int64_t i = 0; i < half; i += tile) {
          const int64_t n = std::min<int64_t>(tile, half - i), at = group * a.rotary + i;
          for (int64_t j = 0; j < n; ++j) {
            Math s[2];
            gpu::rope_entry(a, row, x, int32_t(at + j), cos_low[j], s[0]);
            gpu::rope_entry(a, row, x, int32_t(at + half + j), cos_high[j], s[1]);
            sin_low[j] = s[a.transposed];
            sin_high[j] = s[1 - a.transposed];
          }
          each_head(y, x, part, [&](int64_t from, int64_t to) {
            const Math* u = load(convert, from, at, n, first);
            const Math* v = load(convert, from, at + half, n, second);
            for (int64_t j = 0; j < n; ++j) {
              low[j] = gpu::fma(v[j], sin_low[j], u[j] * cos_low[j]);
              high[j] = gpu::fma(u[j], sin_high[j], v[j] * cos_high[j]);
            }
            store(convert, to + at, low, n);
            store(convert, to + at + half, high, n);
          });
        }
      for (int64_t i = turned; i < a.dim; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.dim - i);
        each_head(y, x, part,
                  [&](int64_t from, int64_t to) { store(convert, to + i, load(convert, from, i, n, first), n); });
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Math> void run_cpu(const gpu::Rope& a) {
  bool fits = true;
  if (a.cu_seqlens)
    for (int32_t k = 0; k <= a.sequences; ++k) fits = fits && gpu::rope_span_fits(a, k, gpu::rope_span(a, k));
  const int64_t places = a.height * a.width, parts = places < 64 ? a.batch : 1;
  const int64_t unit_elements = std::max<int64_t>(1, a.batch / parts * a.heads * a.dim);
  run_at_level(Turn<Math>{a, parts, fits}, 0, places * parts, std::max<int64_t>(1, elements_per_task / unit_elements));
}
}  // namespace

void rope_cpu(const gpu::Rope& a) { a.type == APEX_F64 ? run_cpu<double>(a) : run_cpu<float>(a); }
}  // namespace apex
