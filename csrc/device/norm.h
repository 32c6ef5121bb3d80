// Layer norm and RMS norm over the rows of a matrix, forward and backward, with or without a residual that is added
// first. Layer norm is `centered`.
//
// Rows whose vectors fit in the registers of one warp or one block take the `rows` kernels: one read and one write
// of every tensor. Longer rows, and rows that no vector fits, take the `long` kernels, which read a row once for each
// step. Sums are float (double for double tensors) in a fixed order; weight gradients are partial sums, one a block,
// that `finish` adds up, so results are the same from run to run.
#pragma once
#include "norm_arguments.h"
#include "norm_layout.h"
#include "reduce.h"
#include "vectors.h"

namespace gpu {
#if !defined(GPU_HOST)
// What is left of a row once normalised: (x - mean) * rstd, or the output without weight and bias.
template <bool centered, class Math> struct Normalized {
  Math mean, rstd, smallest;
  bool from_output;

  GPU_FN Math of_input(Math saved) const { return (centered ? saved - mean : saved) * rstd; }
  GPU_FN Math of_output(Math saved, Math weight, Math bias) const {
    const Math magnitude = maximum(weight < Math(0) ? -weight : weight, smallest);
    return divide(centered ? saved - bias : saved, weight < Math(0) ? -magnitude : magnitude);
  }
  GPU_FN Math operator()(Math saved, Math weight, Math bias) const {
    return from_output ? of_output(saved, weight, bias) : of_input(saved);
  }
};

template <class Math> GPU_FN Math load_statistic(const u8* p, i64 row) { return p ? reinterpret_cast<const Math*>(p)[row] : Math(0); }
template <int width, class Math>
GPU_FN void load_weight(Math (&w)[width], const u8* p, i32 type, i64 index, Math otherwise) {
  if (p) load_values(w, p, type, index);
  else GPU_UNROLL for (int i = 0; i < width; ++i) w[i] = otherwise;
}

// ---- rows that fit in registers -----------------------------------------------------------------------
// The element types of a kernel's rows: one known type, or as the arguments say.
constexpr i32 any_type = -1;
template <i32 fixed> GPU_FN i32 known_type(i32 type) { return fixed == any_type ? type : fixed; }

// The threads that share a row: a warp or the block.
struct RowTeam {
  static constexpr int most_warps = norm_threads / warp_size;
  bool is_warp;
  u32 warp, rank, size;
  i64 first, stride;  // rows
  u32 turn = 0;       // reductions so far

  GPU_FN explicit RowTeam(bool warp_rows) : is_warp(warp_rows), warp(thread_x() / warp_size) {
    const u32 warps = block_size_x() / warp_size;
    rank = is_warp ? lane_id() : thread_x();
    size = is_warp ? (u32)warp_size : block_size_x();
    first = is_warp ? (i64)block_x() * warps + warp : (i64)block_x();
    stride = is_warp ? (i64)grid_x() * warps : (i64)grid_x();
  }
  // Before the first sum: warps that are not there contribute 0.
  GPU_FN void clear(float (&partial)[4 * most_warps]) const {
    for (u32 i = thread_x(); i < 4 * most_warps; i += block_size_x()) partial[i] = 0.0f;
    sync_threads();
  }
  // Every thread of the team gets the sums. One barrier: the halves of `partial` take turns, and a warp that comes
  // back to one has met all others at the barrier between.
  template <int N> GPU_FN void sum(float (&x)[N], float (&partial)[4 * most_warps]) {
    GPU_UNROLL for (int n = 0; n < N; ++n) x[n] = warp_reduce<Sum>(x[n]);
    if (is_warp) return;
    float* const mine = partial + (turn++ & 1) * (2 * most_warps);
    if (lane_id() == 0) GPU_UNROLL for (int n = 0; n < N; ++n) mine[n * most_warps + warp] = x[n];
    sync_threads();
    constexpr int half = most_warps / 8;  // vectors of four
    GPU_UNROLL for (int n = 0; n < N; ++n) x[n] = four_sums<half>(mine + n * most_warps);
    if (size > most_warps / 2 * (u32)warp_size)
      GPU_UNROLL for (int n = 0; n < N; ++n) x[n] += four_sums<half>(mine + n * most_warps + most_warps / 2);
  }

 private:
  template <int count> GPU_FN static float four_sums(const float* p) {
    Vector<float, 4> four[count];
    GPU_UNROLL for (int w = 0; w < count; ++w) four[w] = reinterpret_cast<const Vector<float, 4>*>(p)[w];
    float sum = 0.0f;
    GPU_UNROLL for (int w = 0; w < count; ++w) sum += (four[w].v[0] + four[w].v[1]) + (four[w].v[2] + four[w].v[3]);
    return sum;
  }
};

// Rows on their way: the vectors that a thread works on, of two tensors, in shared memory. They are the thread's own,
// so no barrier is needed, and the copies of rows to come run beside its arithmetic.
template <int width, int vectors> struct StagedRows {
  u8* memory;                // the team's
  const u8 *first, *second;  // tensors; the second may be null
  i32 first_size, second_size;  // bytes of an element
  u32 first_bytes, stage_bytes;
  u32 rank, size, row_vectors;
  i64 hidden, rows;

  GPU_FN StagedRows(const RowTeam& team, u8* shared, i32 stages, i64 rows_, i64 hidden_, const u8* first_, i32 first_size_,
                    const u8* second_, i32 second_size_)
      : first(first_), second(second_), first_size(first_size_), second_size(second_size_), rank(team.rank), size(team.size),
        row_vectors((u32)hidden_ / width), hidden(hidden_), rows(rows_) {
    first_bytes = ((u32)hidden * first_size + 15) / 16 * 16;
    stage_bytes = first_bytes + (second ? ((u32)hidden * second_size + 15) / 16 * 16 : 0);
    memory = shared + (team.is_warp ? team.warp : 0) * (u32)stages * stage_bytes;
  }
  // What lies after the rows of all teams.
  GPU_FN u8* end(const RowTeam& team, u8* shared, i32 stages) const {
    return shared + (team.is_warp ? block_size_x() / warp_size : 1) * (u32)stages * stage_bytes;
  }
  GPU_FN u32 vector(int v) const { return v * size + rank; }
  GPU_FN bool has(int v) const { return vector(v) < row_vectors; }

  GPU_FN static void copy(u8* to, const u8* from, i32 element) {
    if (width == 8 || element == 4) copy_async<16>(to, from);
    else copy_async<8>(to, from);
  }
  GPU_FN void fetch(i64 row, i32 stage) const {
    if (row < rows) {
      u8* const to = memory + (u32)stage * stage_bytes;
      const u8* const from = first + row * hidden * first_size;
      GPU_UNROLL for (int v = 0; v < vectors; ++v)
        if (has(v)) copy(to + vector(v) * (width * first_size), from + vector(v) * (width * first_size), first_size);
      if (second) {
        const u8* const more = second + row * hidden * second_size;
        GPU_UNROLL for (int v = 0; v < vectors; ++v)
          if (has(v)) copy(to + first_bytes + vector(v) * (width * second_size), more + vector(v) * (width * second_size), second_size);
      }
    }
    copy_async_commit();
  }
  GPU_FN static void wait(i32 ahead) {
    if (ahead == 0) copy_async_wait<0>();
    else if (ahead == 1) copy_async_wait<1>();
    else if (ahead == 2) copy_async_wait<2>();
    else copy_async_wait<3>();
  }
  // Zeros past the row's end.
  GPU_FN Words read_first(i32 stage, int v, i32 type) const {
    return has(v) ? load_words<width>(memory + (u32)stage * stage_bytes + vector(v) * (width * first_size), type) : Words{};
  }
  GPU_FN Words read_second(i32 stage, int v, i32 type) const {
    return has(v) ? load_words<width>(memory + (u32)stage * stage_bytes + first_bytes + vector(v) * (width * second_size), type) : Words{};
  }
};

// Weights as floats in shared memory, for all teams of the block; a barrier must follow.
template <int width> GPU_FN void share_weights(float* to, const u8* from, i32 type, float otherwise, i64 hidden) {
  for (u32 at = thread_x() * width; at < (u32)hidden; at += block_size_x() * width) {
    float w[width];
    load_weight(w, from, type, at, otherwise);
    store_values<width>(reinterpret_cast<u8*>(to), type_f32, at, w);
  }
}

template <bool centered, i32 types, int width, int vectors> GPU_FN void norm_forward_rows(const NormForward& a) {
  GPU_DYNAMIC_SHARED(u8, memory);
  GPU_SHARED(Words, partial_words, RowTeam::most_warps);
  float(&partial)[4 * RowTeam::most_warps] = reinterpret_cast<float(&)[4 * RowTeam::most_warps]>(partial_words);
  const i32 input_type = known_type<types>(a.input_type), output_type = known_type<types>(a.output_type);
  RowTeam team(a.warp_rows);
  const StagedRows<width, vectors> staged(team, memory, a.stages, a.rows, a.hidden, a.input, bytes_of(input_type),
                                          a.residual, bytes_of(input_type));
  // Few weights stay in registers, more in shared memory.
  constexpr bool keeps = width * vectors <= norm_most_kept_forward;
  float* const shared_weight = reinterpret_cast<float*>(staged.end(team, memory, a.stages));
  float* const shared_bias = shared_weight + a.hidden;
  if constexpr (!keeps) {
    share_weights<width>(shared_weight, a.weight, a.weight_type, 1.0f, a.hidden);
    if constexpr (centered) share_weights<width>(shared_bias, a.bias, a.weight_type, 0.0f, a.hidden);
  }
  team.clear(partial);
  float weight[keeps ? vectors : 1][width], bias[keeps && centered ? vectors : 1][width];
  if constexpr (keeps) {
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!staged.has(v)) continue;
      load_weight(weight[v], a.weight, a.weight_type, (i64)staged.vector(v) * width, 1.0f);
      if constexpr (centered) load_weight(bias[v], a.bias, a.weight_type, (i64)staged.vector(v) * width, 0.0f);
    }
  }
  const float one_by_hidden = 1.0f / (float)a.hidden;
  const i32 ahead = a.stages - 1;
  for (i32 s = 0; s < ahead; ++s) staged.fetch(team.first + s * team.stride, s);
  i32 stage = 0;
  for (i64 row = team.first; row < a.rows; row += team.stride) {
    staged.fetch(row + ahead * team.stride, stage == 0 ? ahead : stage - 1);
    staged.wait(ahead);
    const i64 begin = row * a.hidden;
    float x[vectors][width], total[1] = {0.0f}, mean = 0.0f;
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      unpack(x[v], staged.read_first(stage, v, input_type), input_type);
      if (a.residual) {
        float y[width];
        unpack(y, staged.read_second(stage, v, input_type), input_type);
        GPU_UNROLL for (int i = 0; i < width; ++i) x[v][i] += y[i];
        round_values(x[v], input_type);
        if (staged.has(v)) store_values(a.sum, input_type, begin + (i64)staged.vector(v) * width, x[v]);
      }
    }
    stage = stage == ahead ? 0 : stage + 1;
    if constexpr (centered) {
      GPU_UNROLL for (int v = 0; v < vectors; ++v)
        GPU_UNROLL for (int i = 0; i < width; ++i) total[0] += x[v][i];
      team.sum(total, partial);
      mean = total[0] * one_by_hidden;
      total[0] = 0.0f;
    }
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      float square = 0.0f;
      GPU_UNROLL for (int i = 0; i < width; ++i) {
        if (centered) x[v][i] -= mean;
        square = fma(x[v][i], x[v][i], square);
      }
      total[0] += staged.has(v) ? square : 0.0f;
    }
    team.sum(total, partial);
    const float rstd = 1.0f / sqrt(fma(total[0], one_by_hidden, (float)a.eps));
    if (team.rank == 0) {
      if (centered) reinterpret_cast<float*>(a.mean)[row] = mean;
      reinterpret_cast<float*>(a.rstd)[row] = rstd;
    }
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      if (!staged.has(v)) continue;
      const i64 at = (i64)staged.vector(v) * width;
      float w[width], b[width];
      if constexpr (!keeps) {
        load_values(w, reinterpret_cast<const u8*>(shared_weight), type_f32, at);
        if constexpr (centered) load_values(b, reinterpret_cast<const u8*>(shared_bias), type_f32, at);
      }
      GPU_UNROLL for (int i = 0; i < width; ++i) {
        const float y = x[v][i] * rstd, scale = keeps ? weight[keeps ? v : 0][i] : w[i];
        if constexpr (centered) x[v][i] = fma(y, scale, keeps ? bias[keeps ? v : 0][i] : b[i]);
        else x[v][i] = y * scale;
      }
      store_values(a.output, output_type, begin + at, x[v]);
    }
  }
}

template <bool centered, i32 types, int width, int vectors> GPU_FN void norm_backward_rows(const NormBackward& a) {
  GPU_DYNAMIC_SHARED(u8, memory);
  GPU_SHARED(Words, partial_words, RowTeam::most_warps);
  float(&partial)[4 * RowTeam::most_warps] = reinterpret_cast<float(&)[4 * RowTeam::most_warps]>(partial_words);
  const i32 input_type = known_type<types>(a.input_type), grad_type = known_type<types>(a.output_type);
  const i32 saved_type = types == any_type && a.from_output ? grad_type : input_type;
  RowTeam team(a.warp_rows);
  const StagedRows<width, vectors> staged(team, memory, a.stages, a.rows, a.hidden, a.saved, bytes_of(saved_type), a.grad_output,
                                          bytes_of(grad_type));
  // As in the forward; the sums of the weights' gradients take most registers.
  constexpr bool keeps = width * vectors <= (centered ? norm_most_kept_backward_centered : norm_most_kept_backward);
  float* const weights = reinterpret_cast<float*>(staged.end(team, memory, a.stages));
  if constexpr (!keeps) share_weights<width>(weights, a.weight, a.weight_type, 1.0f, a.hidden);
  team.clear(partial);
  float kept[keeps ? vectors : 1][width];
  float grad_weight[vectors][width], grad_bias[centered ? vectors : 1][width];
  GPU_UNROLL for (int v = 0; v < vectors; ++v) {
    if constexpr (keeps)
      if (staged.has(v)) load_weight(kept[v], a.weight, a.weight_type, (i64)staged.vector(v) * width, 1.0f);
    GPU_UNROLL for (int i = 0; i < width; ++i) grad_weight[v][i] = grad_bias[centered ? v : 0][i] = 0.0f;
  }
  Normalized<centered, float> normalized{0.0f, 0.0f, (float)a.eps, a.from_output != 0};
  // One vector of the row in `stage`: normalised values, gradients, weights.
  const auto read = [&](i32 stage, int v, float(&x)[width], float(&dy)[width], float(&w)[width]) {
    const Words saved = staged.read_first(stage, v, saved_type), grad = staged.read_second(stage, v, grad_type);
    if constexpr (keeps) GPU_UNROLL for (int i = 0; i < width; ++i) w[i] = kept[v][i];
    else if (staged.has(v)) load_values(w, reinterpret_cast<const u8*>(weights), type_f32, (i64)staged.vector(v) * width);
    unpack(x, saved, saved_type);
    unpack(dy, grad, grad_type);
    if (normalized.from_output) {
      float b[width] = {};
      if (centered && staged.has(v)) load_weight(b, a.bias, a.weight_type, (i64)staged.vector(v) * width, 0.0f);
      GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = normalized.of_output(x[i], w[i], b[i]);
    } else {
      GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = normalized.of_input(x[i]);
    }
  };

  const float one_by_hidden = 1.0f / (float)a.hidden;
  const i32 ahead = a.stages - 1;
  for (i32 s = 0; s < ahead; ++s) staged.fetch(team.first + s * team.stride, s);
  i32 stage = 0;
  float next_mean = 0.0f, next_rstd = 0.0f;
  if (team.first < a.rows) {
    next_mean = load_statistic<float>(a.mean, team.first);
    next_rstd = load_statistic<float>(a.rstd, team.first);
  }
  for (i64 row = team.first; row < a.rows; row += team.stride) {
    const i64 begin = row * a.hidden;
    normalized.mean = next_mean;
    normalized.rstd = next_rstd;
    staged.fetch(row + ahead * team.stride, stage == 0 ? ahead : stage - 1);
    if (row + team.stride < a.rows) {
      next_mean = load_statistic<float>(a.mean, row + team.stride);
      next_rstd = load_statistic<float>(a.rstd, row + team.stride);
    }
    staged.wait(ahead);

    float sums[centered ? 2 : 1] = {};  // of x * g, and of g, where g = dy * weight
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      float x[width], dy[width], w[width];
      read(stage, v, x, dy, w);
      if (!staged.has(v)) continue;
      GPU_UNROLL for (int i = 0; i < width; ++i) {
        const float g = dy[i] * w[i];
        sums[0] = fma(x[i], g, sums[0]);
        grad_weight[v][i] = fma(x[i], dy[i], grad_weight[v][i]);
        if constexpr (centered) {
          sums[1] += g;
          grad_bias[v][i] += dy[i];
        }
      }
    }
    team.sum(sums, partial);
    const float scale = one_by_hidden * normalized.rstd;
    const float along_x = sums[0] * scale, along_one = centered ? sums[centered ? 1 : 0] * scale : 0.0f;
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      float x[width], dy[width], w[width];
      read(stage, v, x, dy, w);
      if (!staged.has(v)) continue;
      GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = fma(-x[i], along_x, fma(dy[i] * w[i], normalized.rstd, -along_one));
      const i64 at = begin + (i64)staged.vector(v) * width;
      if (a.grad_sum) {
        float more[width];
        load_values(more, a.grad_sum, input_type, at);
        GPU_UNROLL for (int i = 0; i < width; ++i) x[i] += more[i];
      }
      store_values(a.grad_input, input_type, at, x);
    }
    stage = stage == ahead ? 0 : stage + 1;
  }

  // The block's partial sums: one team after the other adds its own.
  if (!a.grad_weight) return;
  float* const of_weight = reinterpret_cast<float*>(a.partials) + (i64)block_x() * a.hidden;
  float* const of_bias = of_weight + a.parts * a.hidden;
  const u32 teams = team.is_warp ? block_size_x() / warp_size : 1;
  float* const shared_weight = reinterpret_cast<float*>(memory);
  float* const shared_bias = shared_weight + a.hidden;
  for (u32 t = 0; t < teams; ++t) {
    sync_threads();
    if (teams > 1 && team.warp != t) continue;
    GPU_UNROLL for (int v = 0; v < vectors; ++v) {
      const i64 at = (i64)staged.vector(v) * width;
      if (!staged.has(v)) continue;
      GPU_UNROLL for (int i = 0; i < width; ++i) {
        if (t > 0) grad_weight[v][i] += shared_weight[at + i];
        if (centered && t > 0) grad_bias[centered ? v : 0][i] += shared_bias[at + i];
      }
      const bool last = t == teams - 1;
      store_values<width>(reinterpret_cast<u8*>(last ? of_weight : shared_weight), type_f32, at, grad_weight[v]);
      if (centered) store_values<width>(reinterpret_cast<u8*>(last ? of_bias : shared_bias), type_f32, at, grad_bias[centered ? v : 0]);
    }
  }
}

// ---- rows of any length ---------------------------------------------------------------------------------
template <bool centered, class Math, int width> GPU_FN void norm_forward_long(const NormForward& a) {
  const i64 step = (i64)block_size_x() * width, mine = (i64)thread_x() * width;
  for (i64 row = block_x(); row < a.rows; row += grid_x()) {
    const i64 begin = row * a.hidden;
    const u8* const input = a.residual ? a.sum : a.input;  // a thread reads what it wrote itself
    Math x[width], total = Math(0), mean = Math(0);
    if (a.residual) {
      for (i64 at = mine; at < a.hidden; at += step) {
        Math y[width];
        load_values(x, a.input, a.input_type, begin + at);
        load_values(y, a.residual, a.input_type, begin + at);
        GPU_UNROLL for (int i = 0; i < width; ++i) x[i] += y[i];
        store_values(a.sum, a.input_type, begin + at, x);
      }
    }
    if constexpr (centered) {
      for (i64 at = mine; at < a.hidden; at += step) {
        load_values(x, input, a.input_type, begin + at);
        GPU_UNROLL for (int i = 0; i < width; ++i) total += x[i];
      }
      mean = block_reduce<Sum>(total) / (Math)a.hidden;
      total = Math(0);
    }
    for (i64 at = mine; at < a.hidden; at += step) {
      load_values(x, input, a.input_type, begin + at);
      GPU_UNROLL for (int i = 0; i < width; ++i) total = fma(x[i] - mean, x[i] - mean, total);
    }
    const Math rstd = Math(1) / sqrt(block_reduce<Sum>(total) / (Math)a.hidden + (Math)a.eps);
    if (thread_x() == 0) {
      if (centered) reinterpret_cast<Math*>(a.mean)[row] = mean;
      reinterpret_cast<Math*>(a.rstd)[row] = rstd;
    }
    for (i64 at = mine; at < a.hidden; at += step) {
      Math w[width], b[width];
      load_values(x, input, a.input_type, begin + at);
      load_weight(w, a.weight, a.weight_type, at, Math(1));
      load_weight(b, centered ? a.bias : nullptr, a.weight_type, at, Math(0));
      GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = fma((x[i] - mean) * rstd, w[i], b[i]);
      store_values(a.output, a.output_type, begin + at, x);
    }
  }
}

// Normalised values, gradients and weights of [at, at + width) of a row.
template <bool centered, class Math, int width>
GPU_FN void load_gradient(const NormBackward& a, const Normalized<centered, Math>& normalized, i64 begin, i64 at,
                          Math (&x)[width], Math (&dy)[width], Math (&w)[width]) {
  Math b[width];
  load_values(x, a.saved, a.from_output ? a.output_type : a.input_type, begin + at);
  load_values(dy, a.grad_output, a.output_type, begin + at);
  load_weight(w, a.weight, a.weight_type, at, Math(1));
  load_weight(b, centered && a.from_output ? a.bias : nullptr, a.weight_type, at, Math(0));
  GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = normalized(x[i], w[i], b[i]);
}

// The gradient of the input alone.
template <bool centered, class Math, int width> GPU_FN void norm_backward_long(const NormBackward& a) {
  const i64 step = (i64)block_size_x() * width, mine = (i64)thread_x() * width;
  for (i64 row = block_x(); row < a.rows; row += grid_x()) {
    const i64 begin = row * a.hidden;
    const Normalized<centered, Math> normalized{load_statistic<Math>(a.mean, row), load_statistic<Math>(a.rstd, row),
                                                (Math)a.eps, a.from_output != 0};
    Math x[width], dy[width], w[width], along_x = Math(0), along_one = Math(0);
    for (i64 at = mine; at < a.hidden; at += step) {
      load_gradient(a, normalized, begin, at, x, dy, w);
      GPU_UNROLL for (int i = 0; i < width; ++i) {
        const Math g = dy[i] * w[i];
        along_x = fma(x[i], g, along_x);
        along_one += g;
      }
    }
    along_x = block_reduce<Sum>(along_x) / (Math)a.hidden;
    along_one = centered ? block_reduce<Sum>(along_one) / (Math)a.hidden : Math(0);
    for (i64 at = mine; at < a.hidden; at += step) {
      load_gradient(a, normalized, begin, at, x, dy, w);
      GPU_UNROLL for (int i = 0; i < width; ++i) x[i] = fma(-x[i], along_x, fma(dy[i], w[i], -along_one)) * normalized.rstd;
      if (a.grad_sum) {
        Math more[width];
        load_values(more, a.grad_sum, a.input_type, begin + at);
        GPU_UNROLL for (int i = 0; i < width; ++i) x[i] += more[i];
      }
      store_values(a.grad_input, a.input_type, begin + at, x);
    }
  }
}

// Partial sums of the weights' gradients. The grid is column_blocks wide and `parts` high, a block column_threads
// wide: its other threads take other rows of the same columns, and are added up at the end.
template <bool centered, class Math> GPU_FN void norm_backward_columns(const NormBackward& a) {
  GPU_SHARED(Math, sums, 2 * norm_threads);
  const u32 threads = block_size_x(), wide = (u32)a.column_threads, high = threads / wide;
  const u32 x_block = block_x() % (u32)a.column_blocks;
  const i64 part = block_x() / (u32)a.column_blocks;
  const u32 lane = thread_x() % wide, of_row = thread_x() / wide;
  const i64 column = (i64)x_block * wide + lane;
  Math of_weight = Math(0), of_bias = Math(0);
  if (column < a.hidden) {
    for (i64 row = part * high + of_row; row < a.rows; row += a.parts * high) {
      const Normalized<centered, Math> normalized{load_statistic<Math>(a.mean, row), load_statistic<Math>(a.rstd, row),
                                                  (Math)a.eps, a.from_output != 0};
      Math x[1], dy[1], w[1];
      load_gradient(a, normalized, row * a.hidden, column, x, dy, w);
      of_weight = fma(x[0], dy[0], of_weight);
      of_bias += dy[0];
    }
  }
  sums[thread_x()] = of_weight;
  sums[norm_threads + thread_x()] = of_bias;
  sync_threads();
  if (of_row != 0 || column >= a.hidden) return;
  for (u32 r = 1; r < high; ++r) {
    of_weight += sums[r * wide + lane];
    of_bias += sums[norm_threads + r * wide + lane];
  }
  Math* const partials = reinterpret_cast<Math*>(a.partials);
  partials[part * a.hidden + column] = of_weight;
  if (centered) partials[(a.parts + part) * a.hidden + column] = of_bias;
}

// ---- the weights' gradients from their partial sums -------------------------------------------------------
// A block takes norm_sum_columns columns; groups of its threads take parts.
template <bool centered, class Math> GPU_FN void norm_backward_finish(const NormBackward& a) {
  GPU_SHARED(Math, sums, 2 * norm_threads);
  const u32 groups = block_size_x() / norm_sum_columns;
  const u32 lane = thread_x() % norm_sum_columns, group = thread_x() / norm_sum_columns;
  const i64 column = (i64)block_x() * norm_sum_columns + lane;
  const Math* const of_weight = reinterpret_cast<const Math*>(a.partials) + column;
  const Math* const of_bias = of_weight + a.parts * a.hidden;
  Math total[2] = {Math(0), Math(0)};
  if (column < a.hidden) {
    for (i64 part = group; part < a.parts; part += groups) {
      total[0] += of_weight[part * a.hidden];
      if (centered) total[1] += of_bias[part * a.hidden];
    }
  }
  sums[thread_x()] = total[0];
  sums[norm_threads + thread_x()] = total[1];
  for (u32 half = groups / 2; half; half /= 2) {  // groups are a power of two
    sync_threads();
    if (group >= half) continue;
    sums[thread_x()] += sums[thread_x() + half * norm_sum_columns];
    if (centered) sums[norm_threads + thread_x()] += sums[norm_threads + thread_x() + half * norm_sum_columns];
  }
  if (group != 0 || column >= a.hidden) return;
  Math x[1] = {sums[thread_x()]};
  store_values(a.grad_weight, a.weight_type, column, x);
  x[0] = sums[norm_threads + thread_x()];
  if (centered && a.grad_bias) store_values(a.grad_bias, a.weight_type, column, x);
}
#endif
}  // namespace gpu

// Kernels of rows in registers, V(name, element type of input and output, elements of a vector, vectors a thread); and
// of long rows, V(name, arithmetic, elements of a vector).
#define NORM_ROWS(V)                                                                         \
  V(bf16x1, gpu::type_bf16, 8, 1) V(bf16x2, gpu::type_bf16, 8, 2) V(bf16x3, gpu::type_bf16, 8, 3) V(bf16x4, gpu::type_bf16, 8, 4) \
  V(f16x1, gpu::type_f16, 8, 1) V(f16x2, gpu::type_f16, 8, 2) V(f16x3, gpu::type_f16, 8, 3) V(f16x4, gpu::type_f16, 8, 4)       \
  V(f32x2, gpu::type_f32, 4, 2) V(f32x4, gpu::type_f32, 4, 4) V(f32x8, gpu::type_f32, 4, 8)       \
  V(anyx2, gpu::any_type, 4, 2) V(anyx4, gpu::any_type, 4, 4) V(anyx8, gpu::any_type, 4, 8)
#define NORM_LONG(V) V(long8, float, 8) V(long1, float, 1) V(long_f64, double, 1)
#define NORM_MATH(V) V(, float) V(_f64, double)

#define NORM_KERNEL(name, Arguments, ...)                                                                  \
  extern "C" GPU_KERNEL(gpu::norm_threads, 1) void name(gpu::Arguments arguments) { __VA_ARGS__(arguments); } \
  GPU_REGISTER(name)
