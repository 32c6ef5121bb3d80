// The joint's backward of little work: a warp takes a row of one gradient, some columns of a frame or of a label, and
// reads what adds up to it. The gradient of the output is read twice, but nothing waits for anything else. The order of
// a sum is the same for vectors and for elements.
#pragma once
#include "transducer_joint.h"

namespace gpu {
#if !defined(GPU_HOST)
template <class Access, JointMask masking> struct JointApart {
  using Math = typename Access::Math;
  using Raw = typename Access::Raw;
  static constexpr bool relu = masking == JointMask::relu, dropout = masking == JointMask::bits;
  static constexpr int width = Access::width, lanes = 8, ahead = 4;
  static constexpr u32 slab = lanes * width,
                       beside = warp_size / lanes;  // columns of a warp; rows that it adds at once

  const TransducerJointBackward& a;

  GPU_FN void run() const {
    const u32 slabs = tiles_of(a.hidden, slab), warps = block_size_x() / warp_size, all = (u32)(a.frames + a.labels);
    const i64 units = a.batch * all * slabs, stride = (i64)grid_x() * warps;
    for (i64 unit = (i64)block_x() * warps + warp_uniform(thread_x() / warp_size); unit < units; unit += stride) {
      const i64 row = small_quotient(unit, slabs), b = small_quotient(row, all);
      const u32 first_column = (u32)(unit - row * slabs) * slab, place = (u32)(row - b * all);
      if (place < a.frames) add<true>(b, place, first_column);
      else add<false>(b, place - (u32)a.frames, first_column);
    }
  }

 private:
  struct Some {
    Raw x[ahead], other[ahead];
    u32 bits[ahead];
  };
  GPU_FN i64 column_of(u32 first_column) const { return first_column + lane_id() % lanes * width; }
  GPU_FN Raw load(const u8* tensor, i64 row, i64 column) const {
    return Access::load(tensor + Access::bytes(a.type, row * a.hidden + column), a.type, width);
  }
  // A frame's sum over labels, or a label's over frames.
  template <bool of_frame> GPU_FN void add(i64 b, u32 place, u32 first_column) const {
    const TransducerItem item(a, b);
    const i64 column = column_of(first_column), first_row = of_frame ? item.row(place, 0) : item.row(0, place);
    const u32 live = of_frame ? (place < item.frames ? item.labels : 0) : (place < item.labels ? item.frames : 0);
    // Where rows do not depend on lengths they are on their way while these are.
    const u32 rows = a.batch_offset ? live : (u32)(of_frame ? a.labels : a.frames);
    const i64 own_row = of_frame ? b * a.frames + place : b * a.labels + place,
              other_row = of_frame ? b * a.labels : b * a.frames;
    const bool has = column < a.hidden;
    Math own[width] = {}, sum[width] = {};
    if (relu && has) Access::unpack(own, load(of_frame ? a.f : a.g, own_row, column));
    for (u32 first = lane_id() / lanes; first < rows; first += beside * ahead) {
      Some some{};
      GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) {
        const u32 i = first + k * beside;
        if (i >= rows || !has) continue;
        const i64 row = first_row + (of_frame ? (i64)i : i * item.stride);
        some.x[k] = load(a.grad_output, row, column);
        if constexpr (relu) some.other[k] = load(of_frame ? a.g : a.f, other_row + i, column);
        if constexpr (dropout) some.bits[k] = a.mask[row * ((a.hidden + 7) / 8) + column / 8] >> column % 8;
      }
      GPU_UNROLL_FOR (int k = 0; k < ahead; ++k)
        if (first + k * beside < live) add_row(sum, own, some, k);
    }
    GPU_UNROLL_FOR (int mask = lanes; mask < warp_size; mask <<= 1)
      GPU_UNROLL_FOR (int i = 0; i < width; ++i) sum[i] += shuffle_xor_value(sum[i], mask);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) sum[i] = live ? sum[i] * (Math)a.scale : item.otherwise(Math(0));
    if (lane_id() < lanes && has)
      Access::store((of_frame ? a.grad_f : a.grad_g) + Access::bytes(a.type, own_row * a.hidden + column), a.type,
                    width, sum);
  }
  GPU_FN static void add_row(Math (&sum)[width], const Math (&own)[width], const Some& some, int k) {
    Math x[width], other[width];
    Access::unpack(x, some.x[k]);
    if constexpr (relu) Access::unpack(other, some.other[k]);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      bool passes = true;
      if constexpr (relu) passes = !(own[i] <= -other[i]);
      if constexpr (dropout) passes = some.bits[k] >> i & 1;
      sum[i] += passes ? x[i] : Math(0);
    }
  }
};
template <class Access, JointMask masking> GPU_FN void transducer_joint_backward_apart(
    const TransducerJointBackward& a) {
  JointApart<Access, masking>{a}.run();
}
#endif
}  // namespace gpu
