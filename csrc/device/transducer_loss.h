// The transducer (RNN-T) loss: -log of the probability of an item's labels, summed over all ways to spread them over
// its frames, and its gradient. A node (t, u) has seen t frames and u labels; from it a blank leads to (t + 1, u), the
// next label to (t, u + 1), with the probabilities that softmax gives row (t, u) of x; the last blank leads out.
//
//   alpha(t, u): log p of all ways from (0, 0) to the node       beta(t, u): log p of all ways from it to the end
//
// These get as large as the lattice is long, and a float of 1,000 has rounded 3e-5 away, which the gradient's exp would
// show: each is kept as a whole number and a rest, and so is a row's logarithm.
//
// Three kernels. `emissions` reads each row once: the logarithm of its sum of exponentials, and log p of the blank and
// of the next label, stored by diagonals t + u. `lattice` goes along the diagonals, two blocks an item: one adds up
// alpha, one beta; nodes of a diagonal are independent. `backward` reads each row once and writes its gradient once:
//
//   gradient = g * (softmax(x) * p(node) - [blank] p(blank edge) - [next label] p(label edge))
//
// where the p's are of passing the node or the edge, given the labels. Rows that no item has get gradient 0. An item
// whose lengths, rows or labels do not fit is nan: its loss, and its gradient (an item without frames, too).
#pragma once
#include "exchange.h"
#include "exponential.h"
#include "logarithm.h"
#include "packets.h"
#include "reduce.h"
#include "transducer_item.h"
#include "transducer_loss_arguments.h"

namespace gpu {
constexpr double log2_of_e = 1.4426950408889634;
template <class Math> GPU_FN Math minus_infinity() { return (Math)bit_cast<float>(0xff800000u); }

// log p: the sum of the two. The rest of log_add's results is in [-1/2, 1/2 + log 2]; where p is 0 it is -inf.
template <class Math> struct alignas(2 * sizeof(Math)) LogP {
  Math whole, rest;
  GPU_FN LogP then(const LogP& edge) const { return {whole + edge.whole, rest + edge.rest}; }
};
// The whole number next to x.
template <class Math> GPU_FN Math nearest(Math x) {
  constexpr Math round =
      sizeof(Math) == 8 ? Math(6755399441055744.0) : Math(12582912.0);  // 1.5 * 2^52, 2^23: adding it rounds
  return (x + round) - round;
}
template <class Math> GPU_FN LogP<Math> in_parts(Math x) {
  const Math whole = nearest(max_number(x, Math(-4194304.0)));  // finite where x is -inf
  return {whole, x - whole};
}
template <class Math> GPU_FN LogP<Math> impossible() { return {Math(0), minus_infinity<Math>()}; }
// By elements: tensors of a caller's may lie anywhere.
template <class Math> GPU_FN LogP<Math> log_p_of(const u8* tensor, i64 node) {
  const Math* const at = reinterpret_cast<const Math*>(tensor) + 2 * node;
  return {at[0], at[1]};
}

// log(1 + e) for e in [0, 1], for a chain that waits for it: no division, and terms in pairs.
GPU_FN float log_of_one_plus_at_once(float e) {
  const float square = e * e, fourth = square * square;  // minimax, relative error 5e-9
  const float first = fma(fma(-0.249541337f, e, 0.333299624f), square, fma(-0.499999024f, e, 1.0f));
  const float second = fma(fma(-0.0569595342f, e, 0.106036549f), square, fma(-0.153055926f, e, 0.196759393f));
  return e * fma(fma(fma(-0.00324402518f, e, 0.0198514624f), fourth, second), fourth, first);
}
GPU_FN double log_of_one_plus_at_once(double e) { return log_of_one_plus(e); }

// log(exp(a) + exp(b)); a nan stays. The larger one's rest becomes small while the logarithm is on its way.
template <class Math> GPU_FN LogP<Math> log_add(LogP<Math> a, LogP<Math> b) {
  const Math more = (b.rest - a.rest) + (b.whole - a.whole);
  const Math e = exp2((more > Math(0) ? -more : more) * Math(log2_of_e));
  const LogP<Math> high = more > Math(0) ? b : a;
  const Math whole = nearest(high.rest);
  const LogP<Math> sum{high.whole + whole, (high.rest - whole) + log_of_one_plus_at_once(e)};
  return a.rest == minus_infinity<Math>() && b.rest == minus_infinity<Math>() ? a : sum;
}

#if !defined(GPU_HOST)
template <class Math> GPU_FN Math not_a_number() { return (Math)bit_cast<float>(0x7fc00000u); }

// Node (t, u) of item b, of all there may be.
struct TransducerNode {
  i64 b;
  u32 t, u;
  template <class Arguments> GPU_FN TransducerNode(const Arguments& a, i64 unit) {
    const i64 frame = small_quotient(unit, (u32)a.labels);
    b = small_quotient(frame, (u32)a.frames);
    t = (u32)(frame - b * a.frames);
    u = (u32)(unit - frame * a.labels);
  }
};
template <class Arguments> GPU_FN i64 label_of(const Arguments& a, i64 b, u32 u) {
  const i64 at = b * (a.labels - 1) + u;
  return a.wide_labels ? reinterpret_cast<const i64*>(a.label)[at] : (i64) reinterpret_cast<const i32*>(a.label)[at];
}
#endif
}  // namespace gpu
