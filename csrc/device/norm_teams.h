// Layer norm of rows of a few lengths, in halves, by one block that fills a multiprocessor: as norm_rows.h, but
//   - the length is known when the kernel is compiled: offsets are constants, and nothing asks where a row ends;
//   - the block's teams of warps work on a row each, and share weights and bias, so that there is shared memory for
//     more rows on their way; in the backward they add their gradients of weights up, and one partial sum a block is
//     left.
// norm_layout.h lists the shapes; norm_rows.h takes what they do not fit.
#pragma once
#include "norm_arguments.h"
#include "norm_layout.h"
#include "reduce.h"
#include "vectors.h"

namespace gpu {
#if !defined(GPU_HOST) && !defined(GPU_HIP)
// How a block shares rows of `hidden` halves: a thread has `vectors` vectors of each of its team's rows.
template <int hidden_, int vectors_, int teams_, int stages_> struct Teams {
  static constexpr int hidden = hidden_, vectors = vectors_, teams = teams_, stages = stages_, width = 8;
  static constexpr int threads = hidden / (vectors * width), warps = threads / warp_size,
                       block = teams * threads;  // of a team; of all
  static constexpr u32 apart = warp_size * width, row_bytes = hidden * 2,
                       quads = hidden / 4;  // elements between a thread's vectors
  static_assert(warps * warp_size * vectors * width == hidden && warps % 2 == 0, "whole warps make a row");
  const u32 warp_of_block = warp_uniform(thread_x() / warp_size), team = warp_of_block / warps,
            warp = warp_of_block % warps;
  const u32 begin = warp * vectors * apart + lane_id() * width;           // the thread's first element
  const u32 first = block_x() * teams + team, stride = grid_x() * teams;  // rows
  GPU_FN u32 turns(i64 rows) const { return first < rows ? (u32)((rows - first + stride - 1) / stride) : 0; }

  // Floats of a row's length in shared memory: quads of a warp's lanes lie side by side. The first column of quad `i`.
  GPU_FN static u32 column(u32 i) {
    return (i / (2 * warp_size) * warp_size + i % warp_size) * width + i / warp_size % 2 * 4;
  }
  // Quad `q` of vector `v` of this thread.
  GPU_FN u32 quad(int v, int q) const { return ((warp * vectors + v) * 2 + q) * warp_size + lane_id(); }
  GPU_FN static void load(Vector<float, 4>* to, const u8* from, i32 type, float otherwise) {
    for (u32 i = thread_x(); i < quads; i += block) {
      float x[4] = {otherwise, otherwise, otherwise, otherwise};
      if (from) load_values(x, from, type, column(i));
      to[i] = {{x[0], x[1], x[2], x[3]}};
    }
  }
  // Halves of a row's length, as they are in memory.
  GPU_FN static void load_halves(Words* to, const u8* from, i32 type, float otherwise) {
    const float same[width] = {otherwise, otherwise, otherwise, otherwise, otherwise, otherwise, otherwise, otherwise};
    for (u32 i = thread_x(); i < quads / 2; i += block)
      to[i] = from ? reinterpret_cast<const Words*>(from)[i] : pack(same, type);
  }
};

// The sum of what a team's warps posted side by side.
template <int warps> GPU_FN float sum_posted(const float* posted) {
  constexpr int wide = warps % 4 ? 2 : 4;
  const Vector<float, wide>* const all = reinterpret_cast<const Vector<float, wide>*>(posted);
  Vector<float, wide> total = all[0];
  GPU_UNROLL_FOR (int q = 1; q < warps / wide; ++q)
    GPU_UNROLL_FOR (int i = 0; i < wide; ++i) total.v[i] += all[q].v[i];
  return wide == 2 ? total.v[0] + total.v[1] : (total.v[0] + total.v[1]) + (total.v[wide - 2] + total.v[wide - 1]);
}

// Weights and bias are of `type` too: they stay packed, which leaves shared memory, and time to read it, for the rows.
template <i32 type, class Shape> GPU_FN void layer_norm_forward_teams(const NormForward& a) {
  constexpr int vectors = Shape::vectors, width = Shape::width, warps = Shape::warps, stages = Shape::stages,
                hidden = Shape::hidden;
  constexpr u32 apart = Shape::apart * 2, ring_bytes = stages * Shape::row_bytes;
  GPU_DYNAMIC_SHARED(u8, memory);
  typedef Vector<float, 4> Quad;
  GPU_SHARED(Quad, exchange, Shape::teams * warps);  // of each team, for two turns: a mean and a sum of squares a warp
  const Shape shape;
  float* const posted = reinterpret_cast<float*>(exchange + shape.team * warps);

  const u32 turns = shape.turns(a.rows);
  const i64 step = (i64)shape.stride * Shape::row_bytes, from = (i64)shape.first * Shape::row_bytes + shape.begin * 2;
  u8* const ring =
      memory + 2 * Shape::row_bytes + shape.team * ring_bytes + shape.begin * 2;  // slots that no other thread touches
  const u8* x_ahead = a.input + from;
  u32 ahead = 0;
  const auto fetch = [&](u32 at) {
    if (ahead++ < turns) {
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) copy_async<16>(ring + at + v * apart, x_ahead + v * apart);
      x_ahead += step;
    }
    copy_async_commit();
  };
  for (u32 turn = 0; turn + 1 < stages; ++turn) fetch(turn * Shape::row_bytes);
  Shape::load_halves(reinterpret_cast<Words*>(memory), a.weight, type, 1.0f);
  Shape::load_halves(reinterpret_cast<Words*>(memory + Shape::row_bytes), a.bias, type, 0.0f);
  const u8 *const weight = memory + shape.begin * 2, *const bias = weight + Shape::row_bytes;
  sync_threads();

  u8* to = a.output + from;
  float *mean_to = reinterpret_cast<float*>(a.mean) + shape.first,
        *rstd_to = reinterpret_cast<float*>(a.rstd) + shape.first;
  u32 at = 0, half = 0;
  for (u32 left = turns; left; --left) {
    fetch(at == 0 ? ring_bytes - Shape::row_bytes : at - Shape::row_bytes);  // the row before gives way
    copy_async_wait<stages - 1>();
    float x[vectors][width], mean = 0.0f, squares = 0.0f;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      unpack(x[v], *reinterpret_cast<const Words*>(ring + at + v * apart), type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) mean += x[v][i];
    }
    mean *= 1.0f / (vectors * width);
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) squares = fma(x[v][i] - mean, x[v][i] - mean, squares);
    // As RowTeam::merge.
    float count = vectors * width;
    GPU_UNROLL_FOR (int mask = 1; mask < warp_size; mask *= 2) {
      const float other = shuffle_xor_value(mean, mask), difference = other - mean;
      squares += shuffle_xor_value(squares, mask);
      mean = 0.5f * (mean + other);
      squares = fma(difference * difference, 0.5f * count, squares);
      count *= 2.0f;
    }
    float* const means = posted + half;
    if (lane_id() == 0) {
      means[shape.warp] = mean;
      means[warps + shape.warp] = squares;
    }
    sync_team(shape.team, Shape::threads);
    mean = sum_posted<warps>(means) * (1.0f / warps);
    squares = sum_posted<warps>(means + warps);
    float between = 0.0f;
    GPU_UNROLL_FOR (int w = 0; w < warps; ++w) between = fma(means[w] - mean, means[w] - mean, between);
    squares = fma(between, count, squares);
    half ^= 2 * warps;

    const float rstd = rsqrt(fma(squares, 1.0f / hidden, (float)a.eps)), shift = -mean * rstd;
    if (shape.warp == 0 && lane_id() == 0) {
      *mean_to = mean;
      *rstd_to = rstd;
    }
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      float w[width], b[width];
      unpack(w, *reinterpret_cast<const Words*>(weight + v * apart), type);
      unpack(b, *reinterpret_cast<const Words*>(bias + v * apart), type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[v][i] = fma(fma(x[v][i], rstd, shift), w[i], b[i]);
      store_words<width>(to + v * apart, type, pack(x[v], type));
    }
    to += step;
    mean_to += shape.stride;
    rstd_to += shape.stride;
    at = at + Shape::row_bytes == ring_bytes ? 0 : at + Shape::row_bytes;
  }
}

// From the input that was saved. Rows are taken from the last to the first, as in norm_rows.h.
template <i32 type, class Shape> GPU_FN void layer_norm_backward_teams(const NormBackward& a) {
  using Quad = Vector<float, 4>;
  constexpr int vectors = Shape::vectors, width = Shape::width, warps = Shape::warps, stages = Shape::stages,
                hidden = Shape::hidden;
  constexpr u32 apart = Shape::apart * 2, stage_bytes = 2 * Shape::row_bytes, ring_bytes = stages * stage_bytes;
  GPU_DYNAMIC_SHARED(u8, memory);
  GPU_SHARED(Quad, exchange, Shape::teams * warps);  // of each team, for two turns: two sums a warp
  const Shape shape;
  float* const posted = reinterpret_cast<float*>(exchange + shape.team * warps);

  const u32 turns = shape.turns(a.rows);
  const i64 last = a.rows - 1 - shape.first, step = (i64)shape.stride * Shape::row_bytes,
            from = last * Shape::row_bytes + shape.begin * 2;
  u8* const ring = pinned_shared(memory + hidden * 4 + shape.team * ring_bytes +
                                 shape.begin * 2);  // slots that no other thread touches
  const u8 *x_ahead = a.saved + from, *dy_ahead = a.grad_output + from;
  u32 ahead = 0;
  const auto fetch = [&](u32 at) {
    if (ahead++ < turns) {
      GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
        copy_async<16>(ring + at + v * apart, x_ahead + v * apart);
        copy_async<16>(ring + at + Shape::row_bytes + v * apart, dy_ahead + v * apart);
      }
      x_ahead -= step;
      dy_ahead -= step;
    }
    copy_async_commit();
  };
  for (u32 turn = 0; turn + 1 < stages; ++turn) fetch(turn * stage_bytes);
  Quad* const constants = reinterpret_cast<Quad*>(memory);
  Shape::load(constants, a.weight, a.weight_type, 1.0f);
  const Quad* const weight = constants + shape.quad(0, 0);
  sync_threads();

  float grad_weight[vectors][width] = {}, grad_bias[vectors][width] = {};
  const float *mean_at = reinterpret_cast<const float*>(a.mean) + last,
              *rstd_at = reinterpret_cast<const float*>(a.rstd) + last;
  float next_mean = 0.0f, next_rstd = 0.0f;
  if (turns > 0) {
    next_mean = *mean_at;
    next_rstd = *rstd_at;
  }
  u8* to = a.grad_input + from;
  u32 at = 0, half = 0;
  for (u32 left = turns; left; --left) {
    const float rstd = next_rstd, shift = -next_mean * rstd;
    fetch(at == 0 ? ring_bytes - stage_bytes : at - stage_bytes);
    copy_async_wait<stages - 1>();
    if (left > 1) {
      next_mean = *(mean_at -= shape.stride);
      next_rstd = *(rstd_at -= shape.stride);
    }
    float x[vectors][width], g[vectors][width], sums[2] = {};  // of x * g, and of g, where g = dy * weight
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      float dy[width];
      unpack(x[v], *reinterpret_cast<const Words*>(ring + at + v * apart), type);
      unpack(dy, *reinterpret_cast<const Words*>(ring + at + Shape::row_bytes + v * apart), type);
      GPU_UNROLL_FOR (int q = 0; q < width / 4; ++q) {
        const Quad w = weight[(v * 2 + q) * warp_size];
        GPU_UNROLL_FOR (int i = q * 4; i < q * 4 + 4; ++i) {
          x[v][i] = fma(x[v][i], rstd, shift);
          g[v][i] = dy[i] * w.v[i % 4];
          sums[0] = fma(x[v][i], g[v][i], sums[0]);
          sums[1] += g[v][i];
          grad_weight[v][i] = fma(x[v][i], dy[i], grad_weight[v][i]);
          grad_bias[v][i] += dy[i];
        }
      }
    }
    // Each half of a warp makes one of the two sums: fewer exchanges.
    const bool second = lane_id() >= warp_size / 2;
    float mine = (second ? sums[1] : sums[0]) + shuffle_xor_value(second ? sums[0] : sums[1], warp_size / 2);
    GPU_UNROLL_FOR (int mask = warp_size / 4; mask; mask /= 2) mine += shuffle_xor_value(mine, mask);
    if (lane_id() % (warp_size / 2) == 0) posted[half + (second ? warps : 0) + shape.warp] = mine;
    sync_team(shape.team, Shape::threads);
    const float scale = rstd * (1.0f / hidden);
    const float along_x = -sum_posted<warps>(posted + half) * scale,
                along_one = -sum_posted<warps>(posted + half + warps) * scale;
    half ^= 2 * warps;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) g[v][i] = fma(x[v][i], along_x, fma(g[v][i], rstd, along_one));
      store_words<width>(to + v * apart, type, pack(g[v], type));
    }
    to -= step;
    at = at + stage_bytes == ring_bytes ? 0 : at + stage_bytes;
  }

  if (!a.grad_weight) return;
  // The teams' sums are added up in order.
  GPU_UNROLL_FOR (int k = 0; k < 2; ++k) {
    sync_threads();
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
      GPU_UNROLL_FOR (int q = 0; q < width / 4; ++q) {
        const float (&sum)[width] = k ? grad_bias[v] : grad_weight[v];
        constants[shape.team * Shape::quads + shape.quad(v, q)] = {
            {sum[q * 4], sum[q * 4 + 1], sum[q * 4 + 2], sum[q * 4 + 3]}};
      }
    sync_threads();
    float* const partials = reinterpret_cast<float*>(a.partials) + (k * a.parts + block_x()) * hidden;
    for (u32 i = thread_x(); i < Shape::quads; i += Shape::block) {
      Quad total = constants[i];
      GPU_UNROLL_FOR (int t = 1; t < Shape::teams; ++t)
        GPU_UNROLL_FOR (int n = 0; n < 4; ++n) total.v[n] += constants[t * Shape::quads + i].v[n];
      *reinterpret_cast<Quad*>(partials + Shape::column(i)) = total;
    }
  }
}
#endif
}  // namespace gpu
