// The kernels of bias and activation (bias_activation.h says what they compute): one read and one write of every
// tensor.
//
// A thread has its columns' bias in registers and walks down rows, several in flight; the first are on their way before
// the bias is. The bias's gradient is summed on the way, in order: same input, same bits. Where one block has all rows
// of its columns it writes that gradient; else each part of the rows leaves a sum in memory. Of small tensors the last
// part to be done adds them up, of large ones the kernel `finish`. Few rows have a kernel whose blocks take all of
// them.
#include "bias_activation.h"
#include "cells.h"
#include "column_sums.h"
#include "few_rows.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
// Numbers of columns side by side, of one tensor or of its two halves, `hidden` apart, all on their way at once;
// `otherwise` where there are none.
template <class Math, int width, int halves>
GPU_FN void load_numbers(Math (&x)[halves][width], const u8* numbers, i32 type, i64 column, i64 hidden,
                         Math otherwise) {
  if (!numbers) {
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[k][i] = otherwise;
  } else if constexpr (width == 1) {
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k) load_values(x[k], numbers, type, k * hidden + column);
  } else {
    Numbers<width> found[halves];
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k) found[k].load(numbers, type, k * hidden + column);
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k) found[k].get(x[k], type);
  }
}

// Where a thread works: its first column, its first row, and how far the next row is.
struct ActivationPlace {
  u32 slots, slot, lane;
  i64 column, row, step;
  bool works;

  GPU_FN ActivationPlace(const BiasActivation& a, int width) {
    slots = block_size_x() / (u32)a.lane_threads;
    slot = thread_x() / (u32)a.lane_threads;
    lane = thread_x() % (u32)a.lane_threads;
    column = ((i64)(block_x() % a.column_blocks) * a.lane_threads + lane) * width;
    row = (i64)(block_x() / a.column_blocks) * slots + slot;
    step = a.parts * slots;
    works = slot < slots && column < a.hidden;
  }
};

// Whether results are of a type that sees all of an exp.
template <i32 fixed> constexpr bool sees_all = fixed != type_f16 && fixed != type_bf16;

template <class Math, int width, i32 fixed, bool gated, class Function>
GPU_FN void forward_rows(const BiasActivation& a, const ActivationPlace& place, const Function& f) {
  constexpr int in_flight = gated ? 4 : 8, halves = gated ? 2 : 1;
  using Moved = Cells<Math, width, fixed>;
  const i64 columns = a.hidden * halves;
  Math bias[halves][width];
  bool has_bias = false;
  for (i64 row = place.row; row < a.rows; row += place.step * in_flight) {
    Moved u[in_flight][halves];
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n)
      if (row + n * place.step < a.rows)
        GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
          u[n][k].load(a.input, a.type, (row + n * place.step) * columns + k * a.hidden + place.column);
    if (!has_bias) load_numbers(bias, a.bias, a.bias_type, place.column, a.hidden, Math(0));
    has_bias = true;
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n) {
      if (row + n * place.step >= a.rows) continue;
      Math x[halves][width], y[width];
      GPU_UNROLL_FOR (int k = 0; k < halves; ++k) u[n][k].get(x[k], a.type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        y[i] = f(x[0][i] + bias[0][i]);
        if constexpr (gated) y[i] *= x[1][i] + bias[1][i];
      }
      Moved::store(a.output, a.type, (row + n * place.step) * a.hidden + place.column, y);
    }
  }
}

template <class Math, int width, i32 fixed, bool gated> struct ForwardRows {
  const BiasActivation& a;
  const ActivationPlace& place;
  GPU_FN void operator()(const Activation<Math, sees_all<fixed>>& f) const {
    forward_rows<Math, width, fixed, gated>(a, place, f);
  }
};
template <class Math, int width, i32 fixed, bool gated> GPU_FN void activation_forward(const BiasActivation& a) {
  const ActivationPlace place(a, width);
  if (place.works) with_activation<Math, sees_all<fixed>>(a, ForwardRows<Math, width, fixed, gated>{a, place});
}

// Of few rows: a vector a thread (few_rows.h).
template <class Math, int width, i32 fixed, bool gated> struct ForwardFew {
  const BiasActivation& a;
  u32 row, column;
  GPU_FN void operator()(const Activation<Math, sees_all<fixed>>& f) const {
    constexpr int halves = gated ? 2 : 1;
    using Moved = Cells<Math, width, fixed>;
    const u32 hidden = (u32)a.hidden;
    Moved u[halves];
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k) u[k].load(a.input, a.type, (row * halves + k) * hidden + column);
    Math bias[halves][width], x[halves][width], y[width];
    load_numbers(bias, a.bias, a.bias_type, column, hidden, Math(0));
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k) u[k].get(x[k], a.type);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      y[i] = f(x[0][i] + bias[0][i]);
      if constexpr (gated) y[i] *= x[1][i] + bias[1][i];
    }
    Moved::store(a.output, a.type, row * hidden + column, y);
  }
};
template <class Math, int width, i32 fixed, bool gated> GPU_FN void activation_forward_few(const BiasActivation& a) {
  const u32 item = block_x() * block_size_x() + thread_x(), row = divide_by_share(item, a.lane_share);
  const u32 column = (item - row * (u32)a.lane_threads) * width;
  if (row < (u32)a.rows)
    with_activation<Math, sees_all<fixed>>(a, ForwardFew<Math, width, fixed, gated>{a, row, column});
}

// The sums over the block's rows of all its columns, from those of each thread; over all rows where the block is the
// last of its columns' parts, or the only one.
template <int width, class Math, int halves>
GPU_FN void sum_bias(const BiasActivation& a, const ActivationPlace& place, const Math (&mine)[halves][width]) {
  constexpr int side = width < 4 ? width : 4;
  typedef Vector<Math, side> Side;
  GPU_DYNAMIC_SHARED(Math, shared);  // [slots][halves][wide]
  GPU_SHARED(u32, is_last, 1);
  const u32 wide = (u32)a.lane_threads * width, values = halves * wide;
  if (place.slot < place.slots)
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
      GPU_UNROLL_FOR (int i = 0; i < width; i += side) {
        Side some;
        GPU_UNROLL_FOR (int j = 0; j < side; ++j) some.v[j] = mine[k][i + j];
        *reinterpret_cast<Side*>(shared + place.slot * values + k * wide + place.lane * width + i) = some;
      }
  sync_threads();
  const i64 columns = a.hidden * halves, first = (i64)(block_x() % a.column_blocks) * wide;
  const auto each_column = [&](const auto& work) {
    GPU_ROLLED_FOR(u32 v = thread_x(); v < values; v += block_size_x()) {
      const bool second = halves == 2 && v >= wide;
      const i64 column = first + (second ? v - wide : v);
      if (column < a.hidden) work(v, second ? a.hidden + column : column);
    }
  };
  const auto write = [&](i64 column, Math total) {
    const Math x[1] = {total};
    store_values(a.grad_bias, a.bias_type, column, x);
  };
  Math* const partials = reinterpret_cast<Math*>(a.partials);
  each_column([&](u32 v, i64 column) {
    const Math total = sum_apart(shared + v, place.slots, values);
    if (a.parts == 1) write(column, total);
    else partials[(i64)(block_x() / a.column_blocks) * columns + column] = total;
  });
  if (a.parts == 1 || !a.counters) return;
  if (!is_last_of(a.counters + block_x() % a.column_blocks, (u32)a.parts, is_last)) return;
  each_column([&](u32, i64 column) {
    constexpr int together = 8;
    Math total = Math(0);
    GPU_ROLLED_FOR(i64 part = 0; part < a.parts; part += together) {
      Math some[together];
      GPU_UNROLL_FOR (int n = 0; n < together; ++n)
        some[n] = part + n < a.parts ? load_coherent(partials + (part + n) * columns + column) : Math(0);
      GPU_UNROLL_FOR (int n = 0; n < together; ++n) total += some[n];
    }
    write(column, total);
  });
}

// The gradients of a thread's rows, and in `sums` the bias's of its columns.
template <int in_flight, i32 fixed, class Math, int halves, int width, class Function>
GPU_FN void backward_rows_of(const BiasActivation& a, const Function& f, i64 column, i64 first, i64 step,
                             Math (&sums)[halves][width]) {
  constexpr bool gated = halves == 2;
  using Moved = Cells<Math, width, fixed>;
  const i64 columns = a.hidden * halves;
  Math bias[halves][width], scale[1][width];
  bool has_bias = false;
  for (i64 row = first; row < a.rows; row += step * in_flight) {
    Moved u[in_flight][halves], g[in_flight];
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n)
      if (row + n * step < a.rows) {
        GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
          u[n][k].load(a.input, a.type, (row + n * step) * columns + k * a.hidden + column);
        g[n].load(a.grad_output, a.type, (row + n * step) * a.hidden + column);
      }
    if (!has_bias) {
      load_numbers(bias, a.bias, a.bias_type, column, a.hidden, Math(0));
      if constexpr (!gated) load_numbers(scale, a.scale, a.bias_type, column, a.hidden, Math(1));
    }
    has_bias = true;
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n) {
      if (row + n * step >= a.rows) continue;
      Math x[halves][width], dy[width];
      GPU_UNROLL_FOR (int k = 0; k < halves; ++k) u[n][k].get(x[k], a.type);
      g[n].get(dy, a.type);
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
        Math slope;
        const Math y = f.template value<true>(x[0][i] + bias[0][i], slope);
        if constexpr (gated) {
          const Math gate = x[1][i] + bias[1][i];
          x[1][i] = dy[i] * y;
          x[0][i] = dy[i] * gate * slope;
        } else {
          x[0][i] = dy[i] * slope;
        }
        GPU_UNROLL_FOR (int k = 0; k < halves; ++k) sums[k][i] += x[k][i];
      }
      if constexpr (!gated) {
        if (a.unscaled) Moved::store(a.unscaled, a.type, (row + n * step) * columns + column, x[0]);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[0][i] *= scale[0][i];
      }
      GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
        Moved::store(a.output, a.type, (row + n * step) * columns + k * a.hidden + column, x[k]);
    }
  }
}

template <int in_flight, i32 fixed, class Math, int halves, int width> struct BackwardRows {
  const BiasActivation& a;
  i64 column, first, step;
  Math (&sums)[halves][width];
  GPU_FN void operator()(const Activation<Math, sees_all<fixed>>& f) const {
    backward_rows_of<in_flight, fixed>(a, f, column, first, step, sums);
  }
};
template <int in_flight, i32 fixed, class Math, int halves, int width>
GPU_FN void backward_rows(const BiasActivation& a, i64 column, i64 first, i64 step, Math (&sums)[halves][width]) {
  with_activation<Math, sees_all<fixed>>(
      a, BackwardRows<in_flight, fixed, Math, halves, width>{a, column, first, step, sums});
}

template <class Math, int width, i32 fixed, bool gated> GPU_FN void activation_backward(const BiasActivation& a) {
  const ActivationPlace place(a, width);
  Math sums[gated ? 2 : 1][width] = {};
  if (place.works) backward_rows<gated ? 2 : 4, fixed>(a, place.column, place.row, place.step, sums);
  if (a.grad_bias) sum_bias<width>(a, place, sums);
}

// Of few rows: nothing keeps the card busy then, and what counts is how long one block takes. Its threads do little
// each.
template <class Math, int width, i32 fixed, bool gated> GPU_FN void activation_backward_few(const BiasActivation& a) {
  constexpr int lanes = bias_activation_few_columns / width, halves = gated ? 2 : 1;
  const i64 first = (i64)block_x() * bias_activation_few_columns, column = first + thread_x() % lanes * width;
  Math sums[halves][width] = {};
  if (column < a.hidden)
    backward_rows<2, fixed>(a, column, thread_x() / lanes, bias_activation_few_threads / lanes, sums);
  Math mine[halves * width];
  GPU_UNROLL_FOR (int n = 0; n < halves * width; ++n) mine[n] = sums[n / width][n % width];
  sum_over_rows<lanes, halves * width, bias_activation_few_threads>(mine, [&](u32 lane, u32 n, Math total) {
    const i64 at = first + lane * width + n % width;
    const Math x[1] = {total};
    if (at < a.hidden) store_values(a.grad_bias, a.bias_type, n / width * a.hidden + at, x);
  });
}

template <class Math> GPU_FN void activation_finish(const BiasActivation& a) {
  column_sums(reinterpret_cast<const Math*>(a.partials), a.parts, a.hidden * (a.gated ? 2 : 1), a.grad_bias,
              a.bias_type);
}
#endif
}  // namespace
}  // namespace gpu

// Registers for four blocks at once; compilers for Volta spill then.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
#define ACTIVATION_BLOCKS 3
#define ACTIVATION_WIDE_BLOCKS 1
#else
#define ACTIVATION_BLOCKS 4
#define ACTIVATION_WIDE_BLOCKS 2
#endif
#define KERNEL(name, bounds, body, ...)                                                     \
  extern "C" GPU_KERNEL bounds void bias_activation_##name(gpu::BiasActivation arguments) { \
    gpu::await_previous_kernel();                                                           \
    gpu::body<__VA_ARGS__>(arguments);                                                      \
  }                                                                                         \
  GPU_REGISTER(bias_activation_##name)
#define FORWARD_BLOCKS (gpu::bias_activation_threads, ACTIVATION_BLOCKS)
#define BACKWARD_BLOCKS (gpu::bias_activation_most_threads, ACTIVATION_WIDE_BLOCKS)
#define FINISH_BLOCKS (gpu::column_sums_threads, ACTIVATION_BLOCKS)
#define KERNELS(name, Math, width, type)                                                    \
  KERNEL(forward_##name, FORWARD_BLOCKS, activation_forward, Math, width, type, false)      \
  KERNEL(backward_##name, BACKWARD_BLOCKS, activation_backward, Math, width, type, false)   \
  KERNEL(forward_gated_##name, FORWARD_BLOCKS, activation_forward, Math, width, type, true) \
  KERNEL(backward_gated_##name, BACKWARD_BLOCKS, activation_backward, Math, width, type, true)
KERNELS(bf16x8, float, 8, gpu::type_bf16)
KERNELS(f16x8, float, 8, gpu::type_f16)
KERNELS(f32x4, float, 4, gpu::type_f32)
KERNELS(any1, float, 1, -1)
KERNELS(f64, double, 1, gpu::type_f64)
#define FEW_BLOCKS (gpu::bias_activation_few_threads, 1)
#define FEW_FORWARD(name, width, type)                                                          \
  KERNEL(forward_few_##name, FORWARD_BLOCKS, activation_forward_few, float, width, type, false) \
  KERNEL(forward_few_gated_##name, FORWARD_BLOCKS, activation_forward_few, float, width, type, true)
FEW_FORWARD(bf16x8, 8, gpu::type_bf16)
FEW_FORWARD(f16x8, 8, gpu::type_f16)
FEW_FORWARD(f32x4, 4, gpu::type_f32)
#define FEW_KERNELS(name, width, type)                                                        \
  KERNEL(backward_few_##name, FEW_BLOCKS, activation_backward_few, float, width, type, false) \
  KERNEL(backward_few_gated_##name, FEW_BLOCKS, activation_backward_few, float, width, type, true)
FEW_KERNELS(bf16x2, 2, gpu::type_bf16)
FEW_KERNELS(f16x2, 2, gpu::type_f16)
FEW_KERNELS(f32x2, 2, gpu::type_f32)
KERNEL(finish, FINISH_BLOCKS, activation_finish, float)
KERNEL(finish_f64, FINISH_BLOCKS, activation_finish, double)
