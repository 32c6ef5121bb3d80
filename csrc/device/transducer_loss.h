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
#include "exponential.h"
#include "logarithm.h"
#include "logit_team.h"
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

// Of some logits: the largest, and the sum of exp(logit - largest).
template <class Math> struct LogSum {
  static constexpr Math least = sizeof(Math) == 8 ? Math(-1.7976931348623157e308) : Math(-3.402823466e38);
  Math largest = least, sum = Math(0);

  template <int count> GPU_FN void add(const Math (&x)[count]) {
    Math most = largest;
    GPU_UNROLL_FOR (int i = 0; i < count; ++i) most = max_number(most, x[i]);
    Math sums[2] = {sum * power(largest - most), Math(0)};
    GPU_UNROLL_FOR (int i = 0; i < count; ++i) sums[i & 1] += power(x[i] - most);
    largest = most;
    sum = sums[0] + sums[1];
  }
  GPU_FN void merge(Math other_largest, Math other_sum) {
    const Math most = max_number(largest, other_largest);
    sum = sum * power(largest - most) + other_sum * power(other_largest - most);
    largest = most;
  }
  // Over so many threads side by side, a power of two within a warp.
  GPU_FN void merge_lanes(u32 lanes) {
    for (int mask = (int)lanes / 2; mask; mask >>= 1)
      merge(shuffle_xor_value(largest, mask), shuffle_xor_value(sum, mask));
  }

 private:
  GPU_FN static Math power(Math x) { return exp2(x * Math(log2_of_e)); }
};

// A row's elements: single up to a multiple of 16 bytes, vectors, single.
template <int size, int width> struct TransducerRow {
  u32 head, vectors, tail;
  GPU_FN TransducerRow(const u8* row, u32 classes) {
    const u32 past = (u32)((u64)row % 16) / size;
    head = past ? width - past : 0;
    if (head > classes) head = classes;
    vectors = (classes - head) / width;
    tail = head + vectors * width;
  }
};

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

// ---- emissions ---------------------------------------------------------------------------------------------
template <i32 type, class Math = typename Packet<type>::Math> GPU_FN LogSum<Math> log_sum_of(
    const u8* row, u32 classes, const LogitTeam& team, Math (&parts)[2 * transducer_loss_threads / warp_size]) {
  using P = Packet<type>;
  using Raw = typename P::Raw;
  constexpr int ahead = 4;
  LogSum<Math> sums;
  const TransducerRow<P::size, P::width> part(row, classes);
  const auto add_one = [&](u32 index) {
    const Math x[1] = {load_one<Math>(row, type, index)};
    sums.add(x);
  };
  if (team.rank < part.head) add_one(team.rank);
  const Raw* const vectors = reinterpret_cast<const Raw*>(row + part.head * P::size);
  for (u32 v = team.rank; v < part.vectors; v += ahead * team.size) {
    Raw raw[ahead] = {};
    GPU_UNROLL_FOR (int k = 0; k < ahead; ++k)
      if (v + k * team.size < part.vectors) raw[k] = vectors[v + k * team.size];
    GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) {
      if (v + k * team.size >= part.vectors) continue;
      Math x[P::width];
      P::unpack_raw(x, raw[k]);
      sums.add(x);
    }
  }
  if (team.rank < classes - part.tail) add_one(part.tail + team.rank);
  sums.merge_lanes(team.is_warp ? team.size : warp_size);
  if (team.is_warp) return sums;
  constexpr u32 most_warps = transducer_loss_threads / warp_size;
  const u32 warp = thread_x() / warp_size, warps = block_size_x() / warp_size;
  sync_threads();  // the row before may still be read
  if (lane_id() == 0) parts[warp] = sums.largest, parts[most_warps + warp] = sums.sum;
  sync_threads();
  sums = LogSum<Math>();
  for (u32 w = 0; w < warps; ++w) sums.merge(parts[w], parts[most_warps + w]);
  return sums;
}

template <i32 type> GPU_FN void transducer_loss_emissions(const TransducerLossForward& a) {
  using P = Packet<type>;
  using Math = typename P::Math;
  GPU_SHARED(Math, parts, 2 * transducer_loss_threads / warp_size);
  const LogitTeam team(a.log_lanes);
  const i64 units = a.batch * a.frames * a.labels;
  // Teams of one warp exchange together: all of them take part in every turn.
  for (i64 first = team.first - team.own; first < units; first += team.stride) {
    const i64 unit = first + team.own;
    const bool there = unit < units;
    const TransducerNode node(a, there ? unit : 0);
    const TransducerItem item(a, node.b, 1, 1);
    const bool has = there && node.t < item.frames && node.u < item.labels;
    const i64 row = has ? item.row(node.t, node.u) : 0;
    const u8* const x = a.x + row * a.classes * P::size;
    LogP<Math> normalizer{};
    if (a.normalizers && (has || team.is_warp)) {
      const LogSum<Math> sums = log_sum_of<type>(x, has ? (u32)a.classes : 0, team, parts);
      normalizer = {sums.largest, log(sums.sum)};
    }
    if (team.rank != 0 || !there) continue;
    if (!has) {
      const LogP<Math> zero{};
      reinterpret_cast<LogP<Math>*>(a.alpha)[unit] = reinterpret_cast<LogP<Math>*>(a.beta)[unit] = zero;
      if (a.normalizers && !a.batch_offset) reinterpret_cast<LogP<Math>*>(a.normalizers)[unit] = zero;
      continue;
    }
    if (a.normalizers) reinterpret_cast<LogP<Math>*>(a.normalizers)[row] = normalizer;
    const auto log_p = [&](i64 index) { return (load_one<Math>(x, type, index) - normalizer.whole) - normalizer.rest; };
    Math next = minus_infinity<Math>();
    if (node.u + 1 < item.labels) {
      const i64 label = label_of(a, node.b, node.u);
      next = (u64)label < (u64)a.classes ? log_p(label) : not_a_number<Math>();
    }
    Math* const to = reinterpret_cast<Math*>(a.emissions) +
                     ((node.b * (a.frames + a.labels - 1) + node.t + node.u) * a.labels + node.u) * 2;
    to[0] = log_p(a.blank);
    to[1] = next;
  }
  // The rest of a packed x has no logarithms.
  if (!a.normalizers || !a.batch_offset) return;
  const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0;
  for (i64 row = (end < 0 ? 0 : end) + (i64)block_x() * block_size_x() + thread_x(); row < a.rows;
       row += (i64)grid_x() * block_size_x())
    reinterpret_cast<LogP<Math>*>(a.normalizers)[row] = LogP<Math>{};
}

// ---- lattice -----------------------------------------------------------------------------------------------
// One direction over an item: `forward` from (0, 0), adding up alpha, else from the last node, adding up beta. A node's
// value is the sum over the edge that stays with the labels and the one that goes on, each from or to a node of the
// diagonal before.
template <class Math, bool forward> struct TransducerLattice {
  static constexpr int at_once = 4;  // diagonals whose emissions are on their way
  const TransducerLossForward& a;
  const TransducerItem& item;
  const Math* emissions;  // of the item
  LogP<Math>* nodes;      // alpha or beta of the item
  LogP<Math>* shared;     // [2][labels]; null: nodes are read again
  u32 diagonals;

  struct Edges { Math stay, go; };
  struct Parts {
    LogP<Math> stay, go;
    Parts() = default;
    GPU_FN explicit Parts(const Edges& edges) : stay(in_parts(edges.stay)), go(in_parts(edges.go)) {}
  };
  // The diagonal of step `step`, and whether label u has a node there.
  GPU_FN u32 diagonal(u32 step) const { return forward ? step : diagonals - 1 - step; }
  GPU_FN bool has(u32 step, u32 u) const {
    const u32 d = diagonal(step);
    return step < diagonals && u < item.labels && u <= d && d - u < item.frames;
  }
  GPU_FN Edges load(u32 step, u32 u) const {
    Edges edges{minus_infinity<Math>(), minus_infinity<Math>()};
    if (!has(step, u)) return edges;
    const u32 d = diagonal(step), t = d - u;
    if (forward) {
      const Math* const from = emissions + (i64)(d - 1) * a.labels * 2;
      if (t > 0) edges.stay = from[2 * u];
      if (u > 0) edges.go = from[2 * (u - 1) + 1];
    } else {
      const Math* const from = emissions + ((i64)d * a.labels + u) * 2;
      edges.stay = from[0];
      if (u + 1 < item.labels) edges.go = from[1];
    }
    return edges;
  }
  GPU_FN LogP<Math> value(u32 step, u32 u) const {
    if (shared) return shared[step % 2 * (u32)a.labels + u];
    return nodes[(i64)(diagonal(step) - u) * a.labels + u];
  }
  GPU_FN void visit(u32 step, u32 u, const Parts& edges) const {
    const u32 t = diagonal(step) - u;
    const bool can_stay = forward ? t > 0 : t + 1 < item.frames, can_go = forward ? u > 0 : u + 1 < item.labels;
    LogP<Math> stay = impossible<Math>(), go = impossible<Math>();
    if (can_stay) stay = value(step - 1, u);
    if (can_go) go = value(step - 1, forward ? u - 1 : u + 1);
    put(step, u, log_add(stay.then(edges.stay), go.then(edges.go)));
  }
  GPU_FN void put(u32 step, u32 u, LogP<Math> x) const {
    nodes[(i64)(diagonal(step) - u) * a.labels + u] = x;
    if (shared) shared[step % 2 * (u32)a.labels + u] = x;
  }

  GPU_FN void run() const {
    const u32 mine = thread_x(), last = item.labels - 1;
    if (mine == 0) {
      if (forward) put(0, 0, LogP<Math>{});
      else put(0, last, in_parts(emissions[((i64)(diagonals - 1) * a.labels + last) * 2]));
    }
    if (item.labels > block_size_x()) {
      for (u32 step = 1; step < diagonals; ++step) {
        sync_threads();
        for (u32 u = mine; u < item.labels; u += block_size_x())
          if (has(step, u)) visit(step, u, Parts(load(step, u)));
      }
      return;
    }
    Edges next[at_once];
    Parts edges[at_once];
    GPU_UNROLL_FOR (int k = 0; k < at_once; ++k) edges[k] = Parts(load(1 + k, mine));
    for (u32 first = 1; first < diagonals; first += at_once) {
      GPU_UNROLL_FOR (int k = 0; k < at_once; ++k) next[k] = load(first + at_once + k, mine);
      GPU_UNROLL_FOR (int k = 0; k < at_once; ++k) {
        if (first + k >= diagonals) break;
        sync_threads();
        if (has(first + k, mine)) visit(first + k, mine, edges[k]);
      }
      GPU_UNROLL_FOR (int k = 0; k < at_once; ++k) edges[k] = Parts(next[k]);
    }
  }
};

template <class Math> GPU_FN void transducer_loss_lattice(const TransducerLossForward& a) {
  GPU_DYNAMIC_SHARED(LogP<Math>, memory);
  const i64 nodes = a.frames * a.labels, edges = (a.frames + a.labels - 1) * a.labels * 2;
  for (i64 unit = block_x(); unit < 2 * a.batch; unit += grid_x()) {
    const i64 b = unit / 2;
    const TransducerItem item(a, b, 1, 1);
    sync_threads();
    const Math* const emissions = reinterpret_cast<const Math*>(a.emissions) + b * edges;
    LogP<Math>* const shared = a.shared_diagonals ? memory : nullptr;
    if (unit % 2 == 0) {
      if (!item.bad)
        TransducerLattice<Math, true>{a,         item,
                                      emissions, reinterpret_cast<LogP<Math>*>(a.alpha) + b * nodes,
                                      shared,    item.frames + item.labels - 1}
            .run();
      continue;
    }
    LogP<Math>* const beta = reinterpret_cast<LogP<Math>*>(a.beta) + b * nodes;
    if (!item.bad)
      TransducerLattice<Math, false>{a, item, emissions, beta, shared, item.frames + item.labels - 1}.run();
    // The thread that wrote it: the last step is label 0 alone.
    if (thread_x() == 0)
      store_one(a.loss, a.loss_type, b, item.bad ? not_a_number<Math>() : -(beta[0].whole + beta[0].rest));
  }
}

// ---- backward ----------------------------------------------------------------------------------------------
// The gradient of a row: of every class, and what the blank and the next label have less.
template <class Math> struct RowGradient {
  Math largest, scale, of_blank, of_label;
  i64 label;

  template <i32 type> GPU_FN void set(const TransducerLossBackward& a, const TransducerItem& item,
                                      const TransducerNode& node, i64 row, const u8* x) {
    const i64 item_nodes = node.b * a.frames * a.labels, at = item_nodes + (i64)node.t * a.labels + node.u;
    const Math g = load_one<Math>(a.grad_loss, a.grad_type, node.b * a.grad_stride);
    const LogP<Math> before = log_p_of<Math>(a.alpha, at), all = log_p_of<Math>(a.beta, item_nodes);
    const LogP<Math> normalizer = a.normalizers ? log_p_of<Math>(a.normalizers, row) : LogP<Math>{};
    // Given the labels: p of going on from the node with `p`.
    const auto passing = [&](Math p, const LogP<Math>& onward) {
      return power(((before.whole + onward.whole - all.whole) + p) + (before.rest + onward.rest - all.rest));
    };
    const auto log_p = [&](i64 index) { return (load_one<Math>(x, type, index) - normalizer.whole) - normalizer.rest; };
    const bool last_frame = node.t + 1 == item.frames, last_label = node.u + 1 == item.labels;
    largest = normalizer.whole;
    scale = a.of_logits && g != Math(0) ? g * passing(-normalizer.rest, log_p_of<Math>(a.beta, at)) : Math(0);
    const LogP<Math> end{};
    of_blank = last_frame && !last_label
                   ? Math(0)
                   : g * passing(log_p(a.blank), last_frame ? end : log_p_of<Math>(a.beta, at + a.labels));
    label = -1;
    of_label = Math(0);
    if (last_label) return;
    label = label_of(a, node.b, node.u);
    const bool inside = (u64)label < (u64)a.classes;
    of_label = inside ? g * passing(log_p(label), log_p_of<Math>(a.beta, at + 1)) : not_a_number<Math>();
  }
  GPU_FN Math operator()(Math x) const { return scale == Math(0) ? Math(0) : scale * power(x - largest); }
  GPU_FN Math less(i64 index, i64 blank) const {
    return (index == blank ? of_blank : Math(0)) + (index == label ? of_label : Math(0));
  }

 private:
  GPU_FN static Math power(Math x) { return exp2(x * Math(log2_of_e)); }
};

// Rows [first, end) of the gradient become `value`, by `size` threads.
template <i32 type> GPU_FN void fill_gradient(const TransducerLossBackward& a, i64 first, i64 end,
                                              typename Packet<type>::Math value, i64 rank, i64 size) {
  using P = Packet<type>;
  u8* const to = a.grad_x + first * a.classes * P::size;
  const i64 elements = (end - first) * a.classes, past = (i64)((u64)to % 16) / P::size,
            gap = past ? P::width - past : 0, head = gap < elements ? gap : elements;
  const i64 vectors = (elements - head) / P::width;
  typename P::Math values[P::width];
  GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) values[i] = value;
  for (i64 i = rank; i < head; i += size) store_one(to, type, i, value);
  for (i64 v = rank; v < vectors; v += size)
    reinterpret_cast<typename P::Raw*>(to + head * P::size)[v] = P::pack_raw(values);
  for (i64 i = head + vectors * P::width + rank; i < elements; i += size) store_one(to, type, i, value);
}

template <i32 type> GPU_FN void transducer_loss_backward(const TransducerLossBackward& a) {
  using P = Packet<type>;
  using Math = typename P::Math;
  using Raw = typename P::Raw;
  constexpr int ahead = 4;
  const LogitTeam team(a.log_lanes);
  const i64 units = a.batch * a.frames * a.labels;
  for (i64 unit = team.first; unit < units; unit += team.stride) {
    const TransducerNode node(a, unit);
    const TransducerItem item(a, node.b, 1, 1);
    if (node.t >= item.frames || node.u >= item.labels) {
      if (!a.batch_offset) {
        fill_gradient<type>(a, unit, unit + 1, item.otherwise(Math(0)), team.rank, team.size);
      } else if (item.bad && node.t == 0 && node.u == 0) {
        const i64 first = item.first < 0 ? 0 : item.first, end = item.end > a.rows ? a.rows : item.end;
        if (first < end) fill_gradient<type>(a, first, end, item.otherwise(Math(0)), team.rank, team.size);
      }
      continue;
    }
    const i64 row = item.row(node.t, node.u);
    const u8* const from = a.x + row * a.classes * P::size;
    u8* const to = a.grad_x + row * a.classes * P::size;
    RowGradient<Math> gradient;
    gradient.template set<type>(a, item, node, row, from);
    if (gradient.of_label != gradient.of_label) {
      fill_gradient<type>(a, row, row + 1, gradient.of_label, team.rank, team.size);
      continue;
    }
    const auto one = [&](u32 index) {
      store_one(to, type, index, gradient(load_one<Math>(from, type, index)) - gradient.less(index, a.blank));
    };
    const u32 classes = (u32)a.classes;
    // Vectors need both rows to lie alike.
    if (((u64)from ^ (u64)to) % 16 != 0) {
      for (u32 index = team.rank; index < classes; index += team.size) one(index);
      continue;
    }
    const TransducerRow<P::size, P::width> part(to, classes);
    if (team.rank < part.head) one(team.rank);
    if (team.rank < classes - part.tail) one(part.tail + team.rank);
    const Raw* const read = reinterpret_cast<const Raw*>(from + part.head * P::size);
    Raw* const write = reinterpret_cast<Raw*>(to + part.head * P::size);
    // Vectors that hold the blank and the label; none where they wrap, being in the head.
    const u32 past_blank = (u32)a.blank - part.head, past_label = (u32)gradient.label - part.head;
    const u32 blank_vector = past_blank / P::width, label_vector = gradient.label < 0 ? ~0u : past_label / P::width;
    for (u32 v = team.rank; v < part.vectors; v += ahead * team.size) {
      Raw raw[ahead] = {};
      GPU_UNROLL_FOR (int k = 0; k < ahead; ++k)
        if (v + k * team.size < part.vectors) raw[k] = read[v + k * team.size];
      GPU_UNROLL_FOR (int k = 0; k < ahead; ++k) {
        const u32 at = v + k * team.size;
        if (at >= part.vectors) continue;
        Math x[P::width];
        P::unpack_raw(x, raw[k]);
        GPU_UNROLL_FOR (int i = 0; i < P::width; ++i) x[i] = gradient(x[i]);
        if (at == blank_vector || at == label_vector)
          GPU_UNROLL_FOR (int i = 0; i < P::width; ++i)
            x[i] -= gradient.less((i64)part.head + at * P::width + i, a.blank);
        write[at] = P::pack_raw(x);
      }
    }
  }
  if (!a.batch_offset) return;
  const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0, rest = end < 0 ? 0 : end;
  if (rest < a.rows)
    fill_gradient<type>(a, rest, a.rows, Math(0), (i64)block_x() * block_size_x() + thread_x(),
                        (i64)grid_x() * block_size_x());
}
#endif
}  // namespace gpu
