// Sigmoid focal loss, summed over all examples and real classes and divided by the number of positives.
//
//   loss of a logit = weight * (1 - p_t)^gamma * cross entropy,   p = sigmoid(logit)
//
// where for the class that is the target the weight is alpha and p_t = p, and for others 1 - alpha and 1 - p. The cross
// entropy is that of the smoothed target, 1 - smoothing / 2 or smoothing / 2. Examples with target -2 and padding
// classes count nothing. A target that is no class (background is -1) makes every class of its example negative.
//
// The forward reads the logits once; partial sums, one a block, are added up by `finish` in a fixed order. The backward
// reads the logits once and writes their gradient once.
#pragma once
#include "exponential.h"
#include "focal_loss_arguments.h"
#include "logarithm.h"
#include "packets.h"
#include "reduce.h"

namespace gpu {
template <class Math> struct FocalTerm { Math loss, derivative; };
// What all logits of a call share.
template <class Math> struct FocalFormula {
  Math alpha, gamma, half_smoothing;

  GPU_FN explicit FocalFormula(const FocalLoss& a)
      : alpha((Math)a.alpha), gamma((Math)a.gamma), half_smoothing((Math)(a.smoothing / 2)) {}
  GPU_FN FocalTerm<Math> operator()(Math x, bool positive) const {
    constexpr Math log2_e = Math(1.4426950408889634);
    const bool above = x > Math(0);
    const Math e = exp2((above ? -x : x) * log2_e), small = log_of_one_plus(e), one_by = Math(1) / (Math(1) + e);
    const Math minus_log_p = above ? small : small - x, minus_log_q = above ? small + x : small;  // q = 1 - p
    const Math p = above ? one_by : e * one_by, q = above ? e * one_by : one_by;
    // (1 - p_t)^gamma; with gamma 0 it is 1 whatever the logit.
    const Math exponent = gamma == Math(0) ? Math(0) : gamma * (positive ? minus_log_q : minus_log_p);
    const Math factor = (positive ? alpha : Math(1) - alpha) * exp2(-exponent * log2_e);
    const Math t = positive ? Math(1) - half_smoothing : half_smoothing,
               entropy =
                   (t == Math(1) ? Math(0) : (Math(1) - t) * minus_log_q) + (t == Math(0) ? Math(0) : t * minus_log_p);
    const Math slope = positive ? -gamma * p : gamma * q,
               of_entropy = positive ? half_smoothing - q : p - half_smoothing;  // p - t
    return {factor * entropy, factor * (slope * entropy + of_entropy)};
  }
};

#if !defined(GPU_HOST)
// A place among the logits that goes on one by one.
struct FocalPlace {
  const FocalLoss& a;
  i64 row, target;
  u32 column;
  bool ignored;

  GPU_FN FocalPlace(const FocalLoss& a_, i64 index) : a(a_) {
    if (index <= 0x7fffffff && a.classes <= 0x7fffffff) {  // a division of 32 bits is a fraction of one of 64
      row = (u32)index / (u32)a.classes;
      column = (u32)index % (u32)a.classes;
    } else {
      row = index / a.classes;
      column = (u32)(index - row * a.classes);
    }
    read();
  }
  GPU_FN void read() {
    target = a.wide_targets ? reinterpret_cast<const i64*>(a.targets)[row]
                            : (i64) reinterpret_cast<const i32*>(a.targets)[row];
    ignored = target == focal_loss_ignored;
  }
  GPU_FN void advance() {
    if (++column < (u32)a.classes) return;
    column = 0;
    if (++row < a.rows) read();
  }
  GPU_FN bool counts() const { return !ignored && column < (u32)a.real_classes; }
  GPU_FN bool positive() const { return (i64)column == target; }
};

template <i32 type> GPU_FN void focal_loss_forward(const FocalLoss& a) {
  using P = Packet<type>;
  using Math = typename P::Math;
  const FocalFormula<Math> formula(a);
  const i64 elements = a.rows * a.classes, vectors = a.in_vectors ? elements / P::width : 0;
  const i64 mine = (i64)block_x() * block_size_x() + thread_x(), step = (i64)grid_x() * block_size_x();
  Math sum = Math(0);
  for (i64 v = mine; v < vectors; v += step) {
    Math x[P::width];
    P::unpack_raw(x, reinterpret_cast<const typename P::Raw*>(a.logits)[v]);
    FocalPlace place(a, v * P::width);
    GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) {
      const Math term = formula(x[i], place.positive()).loss;
      sum += place.counts() ? term : Math(0);
      place.advance();
    }
  }
  for (i64 i = vectors * P::width + mine; i < elements; i += step) {
    const FocalPlace place(a, i);
    if (place.counts()) sum += formula(load_one<Math>(a.logits, type, i), place.positive()).loss;
  }
  sum = block_reduce<Sum>(sum);
  if (thread_x() == 0) reinterpret_cast<Math*>(a.partials)[block_x()] = sum;
}

// One block.
template <class Math> GPU_FN void focal_loss_finish(const FocalLoss& a) {
  Math sum = Math(0);
  for (i32 i = (i32)thread_x(); i < a.blocks; i += (i32)block_size_x())
    sum += reinterpret_cast<const Math*>(a.partials)[i];
  sum = block_reduce<Sum>(sum);
  if (thread_x() == 0) *reinterpret_cast<Math*>(a.result) = sum / *reinterpret_cast<const Math*>(a.num_positives);
}

template <i32 type> GPU_FN void focal_loss_backward(const FocalLoss& a) {
  using P = Packet<type>;
  using Math = typename P::Math;
  const FocalFormula<Math> formula(a);
  const Math scale = *reinterpret_cast<const Math*>(a.grad_loss) / *reinterpret_cast<const Math*>(a.num_positives);
  const i64 elements = a.rows * a.classes, vectors = a.in_vectors ? elements / P::width : 0;
  const i64 mine = (i64)block_x() * block_size_x() + thread_x(), step = (i64)grid_x() * block_size_x();
  for (i64 v = mine; v < vectors; v += step) {
    Math x[P::width];
    P::unpack_raw(x, reinterpret_cast<const typename P::Raw*>(a.logits)[v]);
    FocalPlace place(a, v * P::width);
    GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) {
      const Math y = formula(x[i], place.positive()).derivative * scale;
      x[i] = place.counts() ? y : Math(0);
      place.advance();
    }
    reinterpret_cast<typename P::Raw*>(a.result)[v] = P::pack_raw(x);
  }
  for (i64 i = vectors * P::width + mine; i < elements; i += step) {
    const FocalPlace place(a, i);
    const Math y = formula(load_one<Math>(a.logits, type, i), place.positive()).derivative * scale;
    store_one(a.result, type, i, place.counts() ? y : Math(0));
  }
}
#endif
}  // namespace gpu
