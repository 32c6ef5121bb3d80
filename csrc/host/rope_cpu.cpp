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
    if (a.in_element == 1) return load_tile(convert, a.input, a.type, from + k, n, buffer);
    for (int64_t j = 0; j < n; ++j) {
      Math x[1];
      gpu::load_values(x, a.input, a.type, from + (k + j) * a.in_element);
      buffer[j] = x[0];
    }
    return buffer;
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

  // Cosines, and sines as each half of a pair is multiplied by the other's.
  struct Table { alignas(64) Math cos_low[tile], cos_high[tile], sin_low[tile], sin_high[tile]; };
  // Of elements [at, at + n) of the turned ones and those half a head further, of position (row, x).
  APEX_INLINE void load_table(const TileConversions<Math>& convert, int64_t row, int64_t x, int64_t at, int64_t n,
                              Table& t) const {
    const int64_t half = a.rotary / 2;
    if (row >= 0 && a.sin && (a.angle_type == DtypeOf<Math>::value || convert.load[a.angle_type])) {
      load_made_table(convert, row, x, at, n, t);
    } else {
      for (int64_t j = 0; j < n; ++j) {
        gpu::rope_entry(a, row, x, int32_t(at + j), t.cos_low[j], t.sin_low[j]);
        gpu::rope_entry(a, row, x, int32_t(at + half + j), t.cos_high[j], t.sin_high[j]);
      }
    }
    if (a.transposed) std::swap_ranges(t.sin_low, t.sin_low + n, t.sin_high);
  }
  // Of those that somebody made before, whose rows lie together.
  APEX_INLINE void load_made_table(const TileConversions<Math>& convert, int64_t row, int64_t x, int64_t at, int64_t n,
                                   Table& t) const {
    const bool of_x = at >= a.rotary;
    const int64_t step = of_x ? a.angle_step_x : a.angle_step,
                  first = (of_x ? x * a.angle_stride_x : row * a.angle_stride) + (of_x ? at - a.rotary : at) * step;
    const auto load_row = [&](const gpu::u8* table, int64_t from, Math* to) APEX_INLINE_LAMBDA {
      if (step != 1)
        for (int64_t j = 0; j < n; ++j) to[j] = Math(gpu::rope_angle_value(table, a.angle_type, from + j * step));
      else if (const Math* values = load_tile(convert, table, a.angle_type, from, n, to); values != to)
        std::copy(values, values + n, to);
    };
    const gpu::u8 *const cosines = of_x ? a.cos_x : a.cos, *const sines = of_x ? a.sin_x : a.sin;
    load_row(cosines, first, t.cos_low);
    load_row(cosines, first + a.rotary / 2 * step, t.cos_high);
    load_row(sines, first, t.sin_low);
    load_row(sines, first + a.rotary / 2 * step, t.sin_high);
    for (int64_t j = 0; j < n; ++j) t.sin_low[j] = -t.sin_low[j];
  }

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    Table t;
    alignas(64) Math first[tile], second[tile], made_low[tile], made_high[tile];
    const int64_t half = a.rotary / 2;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t place = unit / parts, part = unit % parts, y = place / a.width, x = place % a.width;
      const int64_t row = a.cu_seqlens ? packed_row(place) : a.groups == 2 ? y : x;
      const int64_t turned = row == gpu::rope_unturned ? 0 : int64_t(a.groups) * a.rotary;
      for (int64_t group = 0; group * a.rotary < turned; ++group)
        for (int64_t i = 0; i < half; i += tile) {
          const int64_t n = std::min<int64_t>(tile, half - i), at = group * a.rotary + i;
          load_table(convert, row, x, at, n, t);
          each_head(y, x, part, [&](int64_t from, int64_t to) APEX_INLINE_LAMBDA {
            const Math* u = load(convert, from, at, n, first);
            const Math* v = load(convert, from, at + half, n, second);
            Math* const low = made_tile(a.output, a.type, to + at, made_low);
            Math* const high = made_tile(a.output, a.type, to + at + half, made_high);
#pragma GCC ivdep
            for (int64_t j = 0; j < n; ++j) {
              const Math first_half = u[j], second_half = v[j];
              low[j] = gpu::fma(second_half, t.sin_low[j], first_half * t.cos_low[j]);
              high[j] = gpu::fma(first_half, t.sin_high[j], second_half * t.cos_high[j]);
            }
            store_tile(convert, a.output, a.type, to + at, n, static_cast<const Math*>(low));
            store_tile(convert, a.output, a.type, to + at + half, n, static_cast<const Math*>(high));
          });
        }
      for (int64_t i = turned; i < a.dim; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.dim - i);
        each_head(y, x, part, [&](int64_t from, int64_t to) APEX_INLINE_LAMBDA {
          store_tile(convert, a.output, a.type, to + i, n, load(convert, from, i, n, first));
        });
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
