// Softmax of short rows that do not begin and end with a vector of 16 bytes, without a mask.
//
// Some consecutive rows together are whole vectors: a strip, which a warp brings to shared memory as it lies, works on
// element by element and takes back, so that all accesses to memory are whole vectors. The next strip is on its way
// meanwhile. A lane has every warp_size-th element of a row, `items` of them at most, as floats.
#pragma once
#include "softmax_row.h"
#include "vector_copies.h"
#include "warp.h"

namespace gpu {
#if !defined(GPU_HOST)
// The strips of a warp. Shared memory holds `tensors` strips twice where copies run beside the threads, else once.
template <i32 type, int tensors> struct Strips {
  static constexpr u32 stages = copies_run_beside ? 2 : 1;
  static constexpr u32 size = type == type_f32 ? 4 : 2;
  static constexpr int at_once = 4;  // vectors, so that accesses wait together
  u32 bytes;                         // of a strip
  u32 keys;
  i64 strip, stride;   // the one that is worked on, and from it to the warp's next
  i64 elements, last;  // of the tensor; the last strip's number
  u8* mine;
  u32 stage = 0;

  template <class Arguments> GPU_FN explicit Strips(const Arguments& a) : keys((u32)a.keys), elements(a.rows * a.keys) {
    GPU_DYNAMIC_SHARED(u8, memory);
    const u32 warps = block_size_x() / warp_size, warp = warp_uniform(thread_x() / warp_size);
    bytes = (u32)a.strip_rows * keys * size;
    last = (a.rows - 1) / a.strip_rows;
    strip = (i64)block_x() * warps + warp;
    stride = (i64)grid_x() * warps;
    mine = memory + warp * (stages * tensors * bytes);
  }
  GPU_FN bool more() const { return strip <= last; }
  GPU_FN u8* of(int tensor) const { return mine + (stage * tensors + tensor) * bytes; }
  // Elements of strip `s`, which has fewer than others if it is the last.
  GPU_FN u32 elements_of(i64 s) const {
    const i64 left = elements - s * (bytes / size);
    return left < bytes / size ? (u32)left : bytes / size;
  }
  GPU_FN u32 rows() const { return elements_of(strip) / keys; }

  // Sets strip `s` of the tensors out for the stage that is not worked on, or for the only one.
  GPU_FN void fetch(i64 s, const u8* const (&from)[tensors]) const {
    if (s <= last) {
      const u32 count = elements_of(s), vectors = count * size / 16;
      GPU_UNROLL_FOR (int t = 0; t < tensors; ++t) {
        u8* const to = mine + ((stage ^ (stages - 1)) * tensors + t) * bytes;
        const u8* const strip_from = from[t] + s * bytes;
        each_vector(to, strip_from, vectors, [](u8* x, const u8* y) { copy_vector(x, y); });
        copy_rest(to, strip_from, vectors, count);
      }
    }
    end_copies();
  }
  // Brings the strip that is worked on next; the one after it is on its way afterwards, if there can be two.
  GPU_FN void arrive(const u8* const (&from)[tensors]) {
    if (stages == 1) {
      fetch(strip, from);
    } else {
      stage ^= 1;
      fetch(strip + stride, from);
    }
    await_copies<stages - 1>();
    sync_warp();
  }
  // Takes what is in the first tensor's place back to memory.
  GPU_FN void store(u8* tensor) const {
    sync_warp();
    const u8* const from = of(0);
    u8* const to = tensor + strip * bytes;
    const u32 count = elements_of(strip), vectors = count * size / 16;
    each_vector(to, from, vectors,
                [](u8* x, const u8* y) { *reinterpret_cast<Words*>(x) = *reinterpret_cast<const Words*>(y); });
    copy_rest(to, from, vectors, count);
    sync_warp();  // before another strip takes its place
  }

 private:
  // Calls copy(its place, what is copied) for each of the lane's vectors.
  template <class Copy> GPU_FN static void each_vector(u8* to, const u8* from, u32 vectors, const Copy& copy) {
    constexpr int apart = warp_size * 16;
    to += lane_id() * 16;
    from += lane_id() * 16;
    for (i32 left = (i32)vectors - (i32)lane_id(); left > 0;
         left -= at_once * warp_size, to += at_once * apart, from += at_once * apart)
      GPU_UNROLL_FOR (int k = 0; k < at_once; ++k)
        if (k * warp_size < left) copy(to + k * apart, from + k * apart);
  }
  // What the tensor ends with need not be a vector.
  GPU_FN static void copy_rest(u8* to, const u8* from, u32 vectors, u32 count) {
    const u32 rest = vectors * (16 / size) + lane_id();
    if (rest >= count) return;
    if (size == 4) reinterpret_cast<u32*>(to)[rest] = reinterpret_cast<const u32*>(from)[rest];
    else reinterpret_cast<u16*>(to)[rest] = reinterpret_cast<const u16*>(from)[rest];
  }
};

template <i32 type> struct StripElement;
template <> struct StripElement<type_f32> { using T = float; };
template <> struct StripElement<type_f16> { using T = half; };
template <> struct StripElement<type_bf16> { using T = bfloat16; };

template <i32 type, int items> GPU_FN void softmax_forward_strip(const SoftmaxForward& a) {
  using T = typename StripElement<type>::T;
  constexpr bool exact = type == type_f32;
  const Exponential<float, exact> exponential(a);
  const u32 sign = a.negative ? 0x80000000u : 0u;  // added, it turns a number's sign
  Strips<type, 1> strips(a);
  const u8* const from[1] = {a.input};
  if (strips.stages == 2) {
    strips.stage = 1;
    strips.fetch(strips.strip, from);
  }
  for (; strips.more(); strips.strip += strips.stride) {
    strips.arrive(from);
    T* mine = reinterpret_cast<T*>(strips.of(0)) + lane_id();
    const i32 end = (i32)strips.keys - (i32)lane_id();
    for (u32 row = strips.rows(); row; --row, mine += strips.keys) {
      float x[items], top = Least<float>::finite, sum = 0.0f;
      GPU_UNROLL_FOR (int k = 0; k < items; ++k) {
        x[k] = minus_infinity(0.0f);  // past the row's end; its exponential is 0
        if (k * warp_size < end) x[k] = bit_cast<float>(bit_cast<u32>(to_float(mine[k * warp_size])) + sign);
        top = max_number(top, x[k]);
      }
      top = warp_reduce<Highest>(top);
      GPU_UNROLL_FOR (int k = 0; k < items; ++k) sum += x[k] = exponential(x[k], top);
      sum = warp_reduce<Total>(sum);
      const float reciprocal = 1.0f / sum;
      GPU_UNROLL_FOR (int k = 0; k < items; ++k)
        if (k * warp_size < end) from_float(mine[k * warp_size], quotient<exact>(x[k], sum, reciprocal));
    }
    strips.store(a.output);
  }
}

template <i32 type, int items> GPU_FN void softmax_backward_strip(const SoftmaxBackward& a) {
  using T = typename StripElement<type>::T;
  const float scale = a.factor;
  Strips<type, 2> strips(a);
  const u8* const from[2] = {a.output, a.grad_output};
  if (strips.stages == 2) {
    strips.stage = 1;
    strips.fetch(strips.strip, from);
  }
  for (; strips.more(); strips.strip += strips.stride) {
    strips.arrive(from);
    T* outputs = reinterpret_cast<T*>(strips.of(0)) + lane_id();
    const T* grads = reinterpret_cast<const T*>(strips.of(1)) + lane_id();
    const i32 end = (i32)strips.keys - (i32)lane_id();
    for (u32 row = strips.rows(); row; --row, outputs += strips.keys, grads += strips.keys) {
      float y[items], dy[items], sum = 0.0f;
      GPU_UNROLL_FOR (int k = 0; k < items; ++k)
        if (k * warp_size < end) {
          y[k] = to_float(outputs[k * warp_size]);
          dy[k] = to_float(grads[k * warp_size]);
          sum = fma(y[k], dy[k], sum);
        }
      const float scaled = -warp_reduce<Total>(sum) * scale;
      GPU_UNROLL_FOR (int k = 0; k < items; ++k)
        if (k * warp_size < end) from_float(outputs[k * warp_size], y[k] * fma(dy[k], scale, scaled));
    }
    strips.store(a.grad_input);
  }
}
#endif
}  // namespace gpu
