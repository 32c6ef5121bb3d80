// The kernels of bias and activation (bias_activation.h says what they compute): one read and one write of every
// tensor.
//
// A thread has its columns' bias in registers and walks down rows, several in flight. The bias's gradient is summed on
// the way, a sum for each part of the rows in memory, and `finish` adds these up in order: same input, same bits.
#include "bias_activation.h"
#include "cells.h"
#include "column_sums.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
// A column's number; `otherwise` where there are none.
template <class Math> GPU_FN void load_number(Math& x, const u8* numbers, i32 type, i64 column, Math otherwise) {
  Math one[1] = {otherwise};
  if (numbers) load_values(one, numbers, type, column);
  x = one[0];
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

template <class Math, int width, i32 fixed, bool gated> GPU_FN void activation_forward(const BiasActivation& a) {
  constexpr int in_flight = gated ? 4 : 8, halves = gated ? 2 : 1;
  using Moved = Cells<Math, width, fixed>;
  const ActivationPlace place(a, width);
  const Activation<Math, fixed != type_f16 && fixed != type_bf16> f(a);
  if (!place.works) return;
  const i64 columns = a.hidden * halves;
  Math bias[halves][width];
  GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i)
      load_number(bias[k][i], a.bias, a.bias_type, k * a.hidden + place.column + i, Math(0));
  for (i64 row = place.row; row < a.rows; row += place.step * in_flight) {
    Moved u[in_flight][halves];
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n)
      if (row + n * place.step < a.rows)
        GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
          u[n][k].load(a.input, a.type, (row + n * place.step) * columns + k * a.hidden + place.column);
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

template <class Math, int width, i32 fixed, bool gated> GPU_FN void activation_backward(const BiasActivation& a) {
  constexpr int in_flight = gated ? 2 : 4, halves = gated ? 2 : 1;
  GPU_SHARED(Math, shared, bias_activation_threads * halves * width);
  using Moved = Cells<Math, width, fixed>;
  const ActivationPlace place(a, width);
  const Activation<Math, fixed != type_f16 && fixed != type_bf16> f(a);
  const i64 columns = a.hidden * halves;
  Math bias[halves][width], sums[halves][width], scale[width];
  GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      sums[k][i] = Math(0);
      if (place.works) load_number(bias[k][i], a.bias, a.bias_type, k * a.hidden + place.column + i, Math(0));
    }
  GPU_UNROLL_FOR (int i = 0; i < width; ++i)
    if (place.works) load_number(scale[i], a.scale, a.bias_type, place.column + i, Math(1));
  for (i64 row = place.row; place.works && row < a.rows; row += place.step * in_flight) {
    Moved u[in_flight][halves], g[in_flight];
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n)
      if (row + n * place.step < a.rows) {
        GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
          u[n][k].load(a.input, a.type, (row + n * place.step) * columns + k * a.hidden + place.column);
        g[n].load(a.grad_output, a.type, (row + n * place.step) * a.hidden + place.column);
      }
    GPU_UNROLL_FOR (int n = 0; n < in_flight; ++n) {
      if (row + n * place.step >= a.rows) continue;
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
        if (a.unscaled) Moved::store(a.unscaled, a.type, (row + n * place.step) * columns + place.column, x[0]);
        GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[0][i] *= scale[i];
      }
      GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
        Moved::store(a.output, a.type, (row + n * place.step) * columns + k * a.hidden + place.column, x[k]);
    }
  }
  if (!a.grad_bias) return;
  // Of the block's threads that share columns, in order.
  Math* const mine = shared + thread_x() * (halves * width);
  GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) mine[k * width + i] = sums[k][i];
  sync_threads();
  if (place.slot != 0 || !place.works) return;
  Math* const partials =
      reinterpret_cast<Math*>(a.partials) + (i64)(block_x() / a.column_blocks) * columns + place.column;
  for (u32 slot = 1; slot < place.slots; ++slot)
    GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
      GPU_UNROLL_FOR (int i = 0; i < width; ++i)
        sums[k][i] += mine[slot * (u32)a.lane_threads * (halves * width) + k * width + i];
  GPU_UNROLL_FOR (int k = 0; k < halves; ++k)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) partials[k * a.hidden + i] = sums[k][i];
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
#else
#define ACTIVATION_BLOCKS 4
#endif
#define KERNEL(name, threads, body, ...)                                                                         \
  extern "C" GPU_KERNEL(threads, ACTIVATION_BLOCKS) void bias_activation_##name(gpu::BiasActivation arguments) { \
    gpu::await_previous_kernel();                                                                                \
    gpu::body<__VA_ARGS__>(arguments);                                                                           \
  }                                                                                                              \
  GPU_REGISTER(bias_activation_##name)
#define KERNELS(name, Math, width, type)                                                                  \
  KERNEL(forward_##name, gpu::bias_activation_threads, activation_forward, Math, width, type, false)      \
  KERNEL(backward_##name, gpu::bias_activation_threads, activation_backward, Math, width, type, false)    \
  KERNEL(forward_gated_##name, gpu::bias_activation_threads, activation_forward, Math, width, type, true) \
  KERNEL(backward_gated_##name, gpu::bias_activation_threads, activation_backward, Math, width, type, true)
KERNELS(bf16x8, float, 8, gpu::type_bf16)
KERNELS(f16x8, float, 8, gpu::type_f16)
KERNELS(f32x4, float, 4, gpu::type_f32)
KERNELS(any1, float, 1, -1)
KERNELS(f64, double, 1, gpu::type_f64)
KERNEL(finish, gpu::column_sums_threads, activation_finish, float)
KERNEL(finish_f64, gpu::column_sums_threads, activation_finish, double)
