// The tiles of casts to FP8 (fp8_quantize.h says what is cast), a block of a launch each.
#pragma once
#include "cells.h"
#include "fp8_quantize.h"

namespace gpu {
#if !defined(GPU_HOST)
// Where a thread's part of a tile is.
struct Fp8Place {
  i64 block_row, row0, column0, row, column;

  GPU_FN Fp8Place(u32 block, u32 column_blocks, int width) {
    block_row = block / column_blocks;
    row0 = block_row * fp8_tile_rows;
    column0 = (i64)(block % column_blocks) * fp8_lanes * width;
    row = row0 + thread_x() / fp8_lanes * fp8_tall;
    column = column0 + thread_x() % fp8_lanes * width;
  }
};

// What y is made of at one row.
template <int width, i32 fixed, i32 source, bool gated> struct Fp8Source {
  static constexpr int halves = gated ? 2 : 1, made = gated && source == fp8_of_gradient ? 2 : 1;
  using Moved = Cells<float, width, fixed>;
  using Function = Activation<float, fixed != type_f16 && fixed != type_bf16>;
  Moved g, u[halves];

  GPU_FN void load(const Fp8Quantize& a, i64 row, i64 column) {
    if (source != fp8_of_activation) g.load(a.input, a.type, row * a.columns + column);
    if (source == fp8_of_input) return;
    const u8* from = source == fp8_of_gradient ? a.before : a.input;
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k) u[k].load(from, a.type, (row * halves + k) * a.columns + column);
  }
  GPU_FN void get(const Fp8Quantize& a, const Function& f, float (&y)[made][width]) const {
    if constexpr (source == fp8_of_input) {
      g.get(y[0], a.type);
    } else {
      float x[halves][width];
      GPU_UNROLL_FOR (int k = 0; k < halves; ++k) u[k].get(x[k], a.type);
      if constexpr (source == fp8_of_activation) {
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) y[0][i] = activated<gated>(f, x[0][i], x[halves - 1][i]);
      } else {
        float dy[width], unused;
        g.get(dy, a.type);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i)
          y[0][i] =
              activation_gradient<gated>(f, dy[i], x[0][i], x[halves - 1][i], made == 2 ? y[made - 1][i] : unused);
      }
    }
  }
};

// Of one thread, while its rows pass.
template <int width, int made> struct Fp8Made {
  Fp8Tile<width> tile[made];
  float sums[made][width];
  float largest;
};

template <class Source, int in_flight, int width, int made, class Function>
GPU_FN void fp8_codes(const Fp8Quantize& a, const Fp8Place& place, const Fp8& form, const Function& f, float scale,
                      Fp8Made<width, made>& m) {
  const bool works = place.column < a.columns;
  GPU_UNROLL_FOR (int first = 0; first < fp8_tall; first += in_flight) {
    Source from[in_flight];
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n)
      if (works && place.row + first + n < a.rows) from[n].load(a, place.row + first + n, place.column);
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n) {
      const i64 row = place.row + first + n;
      if (!works || row >= a.rows) {
        GPU_UNROLL_FOR (int h = 0; h < made; ++h) m.tile[h].clear(first + n);
        continue;
      }
      float y[made][width];
      from[n].get(a, f, y);
      GPU_UNROLL_FOR (int h = 0; h < made; ++h) {
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
          m.largest = larger_magnitude(m.largest, y[h][i]);
          m.sums[h][i] += y[h][i];
          y[h][i] *= scale;
        }
        m.tile[h].encode(form, first + n, y[h]);
        if (a.by_row) m.tile[h].store_row(first + n, a.by_row + (row * made + h) * a.columns + place.column);
      }
    }
  }
}

// The scale of y, made by the last block of the largest of all blocks.
GPU_FN void make_scale(const Fp8Quantize& a, const Fp8& form, float largest) {
  GPU_SHARED(u32, is_last, 1);
  float* const amax = reinterpret_cast<float*>(a.counters);
  record_amax(amax, largest);
  if (!is_last_of(a.counters + 1, grid_x(), is_last) || thread_x() != 0) return;
  const float scale = current_scale(load_coherent(amax), form.maximum(), a.epsilon, a.power_of_two);
  *a.made_scale = scale;
  *a.scale_inv = 1.0f / scale;
  a.counters[0] = 0;
}

template <int width, i32 fixed, i32 source, bool gated> GPU_FN void fp8_quantize(const Fp8Quantize& a, u32 block) {
  using Source = Fp8Source<width, fixed, source, gated>;
  constexpr int made = Source::made, in_flight = source == fp8_of_input               ? 8
                                                 : source == fp8_of_gradient && gated ? 2
                                                                                      : 4;
  GPU_SHARED(Words, shared, Fp8Tile<width>::shared_words);
  const Fp8Place place(block, a.column_blocks, width);
  const typename Source::Function f(a);
  Fp8Made<width, made> m;
  m.largest = 0.0f;
  GPU_UNROLL_FOR (int h = 0; h < made; ++h)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) m.sums[h][i] = 0.0f;
  const Fp8 form(a.format);
  fp8_codes<Source, in_flight>(a, place, form, f, a.counters ? 1.0f : *a.scale, m);
  GPU_UNROLL_FOR (int h = 0; h < made; ++h) {
    if (a.by_column) {
      if (h > 0) sync_threads();
      m.tile[h].store_columns(shared, a.by_column + h * a.columns * a.rows, place.row0, a.rows, place.column0,
                              a.columns, a.wide_columns);
    }
    if (a.partials)
      store_column_sums(reinterpret_cast<float*>(shared), m.sums[h],
                        reinterpret_cast<float*>(a.partials) + (place.block_row * made + h) * a.columns, place.column0,
                        a.columns);
  }
  if (a.counters) make_scale(a, form, m.largest);
  else record_amax(a.amax, m.largest);
}
#endif
}  // namespace gpu
