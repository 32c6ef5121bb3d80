// Norms of rows that fit in the registers of one warp or one block: every tensor is read once and written once.
#pragma once
#include "norm_codes.h"
#include "norm_layout.h"
#include "normalized.h"
#include "row_stream.h"

namespace gpu {
#if !defined(GPU_HOST)
// Where rows and weights are while they are worked on: as row_stream.h has them. Another one: norm_held.h.
struct Streamed {
  static constexpr bool staged = true;
  template <i32, int width, int vectors> using Rows = RowStream<width, vectors, 2>;
  template <i32, int width, int vectors> using Constants = RowConstants<width, vectors>;
};

template <bool centered, i32 types, int width, int vectors, class Output = NormNumbers, class Keep = Streamed>
GPU_FN auto norm_forward_rows(const NormForward& a, Output out = {}) {
  using Layout = QuadLayout<width, vectors>;
  GPU_DYNAMIC_SHARED(u8, memory);
  typedef Vector<float, 4> Quad;
  GPU_SHARED(Quad, partial, RowTeam::quads);
  const i32 input_type = known_type<types>(a.input_type), output_type = known_type<types>(a.output_type);
  RowTeam team(a.warp_rows, partial);
  const RowPart<width, vectors> part(team, a.hidden);
  Quad* const constants = reinterpret_cast<Quad*>(memory);
  const u32 quads = (a.warp_rows ? 1 : block_size_x() / warp_size) * vectors * Layout::quads * warp_size;
  u8* const stages = memory + a.constant_bytes;
  constexpr bool has_residual = !Output::as_codes;
  typename Keep::template Rows<types, width, vectors> rows({{a.input, input_type}, {a.residual, input_type}}, team,
                                                           part, stages, a.stages);

  const u32 ahead = rows.depth() * team.stride;
  i64 row = team.first;
  GPU_ROLLED_FOR(u32 turn = 0; turn < rows.depth(); ++turn) {
    const i64 there = row + turn * team.stride;
    rows.start(turn, there < a.rows, part.of_row(there));
  }
  const u32 turns = team.turns(a.rows);
  using Constants = typename Keep::template Constants<types, width, vectors>;
  const Constants weight(a.weight, a.weight_type, 1.0f, team, part, constants);
  const Constants bias(centered ? a.bias : nullptr, a.weight_type, 0.0f, team, part,
                       constants + (centered ? quads : 0));
  if constexpr (Keep::staged) {
    if constexpr (centered)
      fill_constants<width, vectors, 2>({a.weight, a.bias}, {1.0f, 0.0f}, a.weight_type, a.hidden, constants, quads);
    else fill_constants<width, vectors, 1>({a.weight}, {1.0f}, a.weight_type, a.hidden, constants, quads);
    sync_threads();
  }

  // The digits that a rounded 1 / hidden and the hardware's root cost are none of a half's.
  constexpr bool halves = types == type_f16 || types == type_bf16;
  const float one_by_hidden = 1.0f / (float)a.hidden;
  const auto average = [&](float sum) { return halves ? sum * one_by_hidden : sum / (float)a.hidden; };
  // Every thread has as many elements: mean and squares are found with one exchange between the threads.
  const bool whole = centered && a.hidden == (i64)(a.warp_rows ? warp_size : block_size_x()) * (width * vectors);
  for (u32 left = turns; left; --left, row += team.stride) {
    rows.next(left > rows.depth(), part.of_row(row + ahead));
    const i64 at = part.of_row(row);
    float x[vectors][width], mean = 0.0f;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      unpack(x[v], rows.read(0, v), input_type);
      if (has_residual && a.residual) {
        float y[width];
        unpack(y, rows.read(1, v), input_type);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[v][i] += y[i];
        const Words sum = pack(x[v], input_type);
        unpack(x[v], sum, input_type);
        if (part.has(v)) store_words<width>(a.sum + (at + part.offset(v)) * bytes_of(input_type), input_type, sum);
      }
    }
    float squares = 0.0f;
    const auto sum_squares = [&](int v, float from) {
      float square = 0.0f;
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        const float difference = centered ? x[v][i] - from : x[v][i];
        square = fma(difference, difference, square);
      }
      squares += part.has(v) ? square : 0.0f;
    };
    if constexpr (centered) {
      float total[1] = {0.0f};
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) total[0] += x[v][i];
      if (!whole) team.sum(total);
      mean = whole ? total[0] * (1.0f / (width * vectors)) : average(total[0]);
    }
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) sum_squares(v, mean);
    if (whole) {
      team.merge(mean, squares, width * vectors);
    } else {
      float total[1] = {squares};
      team.sum(total);
      squares = total[0];
    }
    const float rstd =
        halves ? rsqrt(fma(squares, one_by_hidden, (float)a.eps)) : 1.0f / sqrt(average(squares) + (float)a.eps);
    // One instruction less; nor does a half show the rounding of a product.
    constexpr bool by_product = centered && halves;
    const float mean_by_std = by_product ? mean * rstd : 0.0f;
    if (team.leads) {
      if (centered) reinterpret_cast<float*>(a.mean)[row] = mean;
      reinterpret_cast<float*>(a.rstd)[row] = rstd;
    }
    u8* const output = a.output + at * bytes_of(output_type);
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      float w[width], b[width];
      weight.read(w, v);
      if constexpr (Output::as_codes) out.centre(w);
      if constexpr (centered) bias.read(b, v);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        if (by_product) x[v][i] = fma(x[v][i], rstd, -mean_by_std);
        else x[v][i] = (centered ? x[v][i] - mean : x[v][i]) * rstd;
        x[v][i] = centered ? fma(x[v][i], w[i], b[i]) : x[v][i] * w[i];
      }
      if constexpr (Output::as_codes) {
        if (part.has(v)) out.store(at + part.offset(v), x[v]);
      } else if (part.has(v)) {
        store_words<width>(output + part.offset(v) * bytes_of(output_type), output_type, pack(x[v], output_type));
      }
    }
  }
  if constexpr (Output::as_codes) return out.largest;
}

// The gradient of the input, and for each block partial sums of the weights' gradients.
//
// Rows are taken from the last to the first: what wrote the gradient wrote those last, and they may still be in the
// second-level cache.
template <bool centered, bool from_output, i32 types, int width, int vectors> GPU_FN void norm_backward_rows(
    const NormBackward& a) {
  using Layout = QuadLayout<width, vectors>;
  // Registers hold what a second use of a row needs as far as they suffice; the rest is computed again.
  constexpr int elements = width * vectors;
  constexpr bool keeps_x = elements <= (centered && from_output ? 16 : 24), keeps_g = elements <= (centered ? 16 : 24);
  GPU_DYNAMIC_SHARED(u8, memory);
  typedef Vector<float, 4> Quad;
  GPU_SHARED(Quad, partial, RowTeam::quads);
  const i32 input_type = known_type<types>(a.input_type), grad_type = known_type<types>(a.output_type);
  const i32 saved_type = from_output ? grad_type : input_type;
  RowTeam team(a.warp_rows, partial);
  const RowPart<width, vectors> part(team, a.hidden);
  Quad* const constants = reinterpret_cast<Quad*>(memory);
  const u32 quads = (a.warp_rows ? 1 : block_size_x() / warp_size) * vectors * Layout::quads * warp_size;
  RowStream<width, vectors, 3> rows({{a.saved, saved_type}, {a.grad_output, grad_type}, {a.grad_sum, input_type}}, team,
                                    part, memory + a.constant_bytes, a.stages);

  const u32 ahead = rows.depth() * team.stride;
  i64 row = a.rows - 1 - team.first;
  GPU_ROLLED_FOR(u32 turn = 0; turn < rows.depth(); ++turn) {
    const i64 there = row - turn * team.stride;
    rows.start(turn, there >= 0, part.of_row(there));
  }
  const u32 turns = team.turns(a.rows);
  const bool has_mean = centered && !from_output;
  const float* const means = reinterpret_cast<const float*>(a.mean);
  const float* const rstds = reinterpret_cast<const float*>(a.rstd);
  float next_mean = 0.0f, next_rstd = 0.0f;
  if (turns > 0) {
    if (has_mean) next_mean = means[row];
    next_rstd = rstds[row];
  }
  const RowConstants<width, vectors> weight(a.weight, a.weight_type, 1.0f, team, part, constants);
  constexpr bool needs_bias = centered && from_output;
  const RowConstants<width, vectors> bias(needs_bias ? a.bias : nullptr, a.weight_type, 0.0f, team, part,
                                          constants + (needs_bias ? quads : 0));
  if constexpr (needs_bias)
    fill_constants<width, vectors, 2>({a.weight, a.bias}, {1.0f, 0.0f}, a.weight_type, a.hidden, constants, quads);
  else fill_constants<width, vectors, 1>({a.weight}, {1.0f}, a.weight_type, a.hidden, constants, quads);
  sync_threads();

  float grad_weight[vectors][width], grad_bias[centered ? vectors : 1][width];
  GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) grad_weight[v][i] = grad_bias[centered ? v : 0][i] = 0.0f;
  Normalized<centered, float> normalized{0.0f, 0.0f, (float)a.eps, from_output};
  const auto read_x = [&](float (&x)[width], const float (&w)[width], int v) {
    unpack(x, rows.read(0, v), saved_type);
    float b[width] = {};
    if constexpr (needs_bias) bias.read(b, v);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i)
      x[i] = from_output ? normalized.of_output(x[i], w[i], b[i]) : normalized.of_input(x[i]);
  };

  const auto add_to_weights = [&](int v, int i, float x, float dy) {
    grad_weight[v][i] = fma(x, dy, grad_weight[v][i]);
    if constexpr (centered) grad_bias[v][i] += dy;
  };

  const float one_by_hidden = 1.0f / (float)a.hidden;
  for (u32 left = turns; left; --left, row -= team.stride) {
    normalized.mean = next_mean;
    normalized.rstd = next_rstd;
    rows.next(left > rows.depth(), part.of_row(row - ahead));
    if (left > 1) {
      if (has_mean) next_mean = means[row - team.stride];
      next_rstd = rstds[row - team.stride];
    }

    float kept_x[keeps_x ? vectors : 1][width], kept_g[keeps_g ? vectors : 1][width];
    float sums[centered ? 2 : 1] = {};  // of x * g, and of g, where g = dy * weight
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      float x[width], dy[width], w[width];
      weight.read(w, v);
      read_x(x, w, v);
      unpack(dy, rows.read(1, v), grad_type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        const float g = dy[i] * w[i];
        sums[0] = fma(x[i], g, sums[0]);
        if constexpr (centered) sums[1] += g;
        if constexpr (keeps_x) {
          add_to_weights(v, i, x[i], dy[i]);
          kept_x[v][i] = x[i];
        }
        if constexpr (keeps_g) kept_g[v][i] = g;
      }
    }
    team.sum(sums);
    const float scale = one_by_hidden * normalized.rstd;
    const float along_x = sums[0] * scale, along_one = centered ? sums[centered ? 1 : 0] * scale : 0.0f;
    u8* const grad_input = a.grad_input + part.of_row(row) * bytes_of(input_type);
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      float x[width], g[width], w[width];
      if constexpr (!keeps_g || (!keeps_x && from_output)) weight.read(w, v);
      if constexpr (keeps_x)
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = kept_x[v][i];
      else read_x(x, w, v);
      if constexpr (keeps_g) {
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) g[i] = kept_g[v][i];
      } else {
        unpack(g, rows.read(1, v), grad_type);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
          if constexpr (!keeps_x) add_to_weights(v, i, x[i], g[i]);
          g[i] *= w[i];
        }
      }
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        g[i] = centered ? fma(g[i], normalized.rstd, -along_one) : g[i] * normalized.rstd;
        g[i] = fma(-x[i], along_x, g[i]);
      }
      if (a.grad_sum) {
        unpack(x, rows.read(2, v), input_type);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) g[i] += x[i];
      }
      if (part.has(v))
        store_words<width>(grad_input + part.offset(v) * bytes_of(input_type), input_type, pack(g, input_type));
    }
  }

  if (!a.grad_weight) return;
  const i64 pitch = norm_partials_pitch(a.hidden);
  float* const partials = reinterpret_cast<float*>(a.partials) + block_x() * pitch;
  const auto quad_of = [](const float (&x)[width], int q) {
    return Quad{{x[q * 4], x[q * 4 + 1], x[q * 4 + 2], x[q * 4 + 3]}};
  };
  GPU_UNROLL_FOR (int k = 0; k < (centered ? 2 : 1); ++k) {
    float* const to = partials + k * a.parts * pitch;
    if (!team.is_warp) {
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
        Quad* const mine = reinterpret_cast<Quad*>(to + part.begin + part.offset(v));
        if (part.has(v))
          GPU_UNROLL_FOR (int q = 0; q < (int)Layout::quads; ++q)
            mine[q] = quad_of(k ? grad_bias[centered ? v : 0] : grad_weight[v], q);
      }
      continue;
    }
    // The block's warps, each with rows of its own, are added up in order; two at a time, where roundings show and
    // registers are left.
    sync_threads();
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
      GPU_UNROLL_FOR (int q = 0; q < (int)Layout::quads; ++q)
        constants[team.warp_of_block * quads + Layout::at(team, v, q)] =
            quad_of(k ? grad_bias[centered ? v : 0] : grad_weight[v], q);
    sync_threads();
    for (u32 i = thread_x(); i < quads; i += block_size_x()) {
      const u32 column = Layout::column(i);
      if (column >= a.hidden) continue;
      const u32 warps = block_size_x() / warp_size;
      constexpr u32 together = !GPU_STAGED || types == type_f16 || types == type_bf16 ? 1 : 2;
      const auto of_warps = [&](u32 warp) {
        Quad sum = constants[warp * quads + i];
        if (together == 1 || warp + 1 == warps) return sum;
        const Quad more = constants[(warp + 1) * quads + i];
        GPU_UNROLL_FOR (int n = 0; n < 4; ++n) sum.v[n] += more.v[n];
        return sum;
      };
      Quad total = of_warps(0);
      for (u32 warp = together; warp < warps; warp += together) {
        const Quad more = of_warps(warp);
        GPU_UNROLL_FOR (int n = 0; n < 4; ++n) total.v[n] += more.v[n];
      }
      *reinterpret_cast<Quad*>(to + column) = total;
    }
  }
}
#endif
}  // namespace gpu
