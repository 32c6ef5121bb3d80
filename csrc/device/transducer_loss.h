// The transducer (RNN-T) loss: -log of the probability of an item's labels, summed over all ways to spread them over its
// frames, and its gradient. A node (t, u) has seen t frames and u labels; from it a blank leads to (t + 1, u), the next
// label to (t, u + 1), with the probabilities that softmax gives row (t, u) of x; the last blank leads out.
//
//   alpha(t, u): log p of all ways from (0, 0) to the node       beta(t, u): log p of all ways from it to the end
//
// Three kernels. `emissions` reads each row once: the logarithm of its sum of exponentials, and log p of the blank and of
// the next label, stored by diagonals t + u. `lattice` goes along the diagonals, two blocks an item: one adds up alpha, one
// beta; nodes of a diagonal are independent. `backward` reads each row once and writes its gradient once:
//
//   gradient = g * (softmax(x) * p(node) - [blank] p(blank edge) - [next label] p(label edge))
//
// where the p's are of passing the node or the edge, given the labels. Rows that no item has get gradient 0. An item whose
// lengths, rows or labels do not fit is nan: its loss, and its gradient (an item without frames, too).
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

// log(exp(a) + exp(b)); of two equal infinities, that; a nan stays.
template <class Math> GPU_FN Math log_add(Math a, Math b) {
  if (a == b) return a + Math(0.6931471805599453);
  const Math high = a > b ? a : b, low = a > b ? b : a;
  return high + log_of_one_plus(exp2((low - high) * Math(log2_of_e)));
}

#if !defined(GPU_HOST)
template <class Math> GPU_FN Math not_a_number() { return (Math)bit_cast<float>(0x7fc00000u); }

// Of some logits: the largest, and the sum of exp(logit - largest).
template <class Math> struct LogSum {
  static constexpr Math least = sizeof(Math) == 8 ? Math(-1.7976931348623157e308) : Math(-3.402823466e38);
  Math largest = least, sum = Math(0);

  template <int count> GPU_FN void add(const Math (&x)[count]) {
    Math most = largest;
    GPU_UNROLL for (int i = 0; i < count; ++i) most = max_number(most, x[i]);
    Math sums[2] = {sum * power(largest - most), Math(0)};
    GPU_UNROLL for (int i = 0; i < count; ++i) sums[i & 1] += power(x[i] - most);
    largest = most;
    sum = sums[0] + sums[1];
  }
  GPU_FN void merge(Math other_largest, Math other_sum) {
    const Math most = max_number(largest, other_largest);
    sum = sum * power(largest - most) + other_sum * power(other_largest - most);
    largest = most;
  }
  GPU_FN void merge_warp() {
    GPU_UNROLL for (int mask = warp_size / 2; mask; mask >>= 1) merge(shuffle_xor_value(largest, mask), shuffle_xor_value(sum, mask));
  }
  GPU_FN Math log_of_sum() const { return largest + log(sum); }

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
template <i32 type, class Math = typename Packet<type>::Math> GPU_FN LogSum<Math> log_sum_of(const u8* row, u32 classes, const LogitTeam& team, Math (&parts)[2 * transducer_loss_threads / warp_size]) {
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
    GPU_UNROLL for (int k = 0; k < ahead; ++k)
      if (v + k * team.size < part.vectors) raw[k] = vectors[v + k * team.size];
    GPU_UNROLL for (int k = 0; k < ahead; ++k) {
      if (v + k * team.size >= part.vectors) continue;
      Math x[P::width];
      P::unpack_raw(x, raw[k]);
      sums.add(x);
    }
  }
  if (team.rank < classes - part.tail) add_one(part.tail + team.rank);
  sums.merge_warp();
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
  const LogitTeam team(a.warp_rows);
  const i64 units = a.batch * a.frames * a.labels;
  for (i64 unit = team.first; unit < units; unit += team.stride) {
    const TransducerNode node(a, unit);
    const TransducerItem item(a, node.b, 1, 1);
    if (node.t >= item.frames || node.u >= item.labels) {
      if (team.rank != 0) continue;
      reinterpret_cast<Math*>(a.alpha)[unit] = reinterpret_cast<Math*>(a.beta)[unit] = Math(0);
      if (a.normalizers && !a.batch_offset) reinterpret_cast<Math*>(a.normalizers)[unit] = Math(0);
      continue;
    }
    const i64 row = item.row(node.t, node.u);
    const u8* const x = a.x + row * a.classes * P::size;
    Math normalizer = Math(0);
    if (a.normalizers) normalizer = log_sum_of<type>(x, (u32)a.classes, team, parts).log_of_sum();
    if (team.rank != 0) continue;
    if (a.normalizers) reinterpret_cast<Math*>(a.normalizers)[row] = normalizer;
    Math next = minus_infinity<Math>();
    if (node.u + 1 < item.labels) {
      const i64 label = label_of(a, node.b, node.u);
      next = (u64)label < (u64)a.classes ? load_one<Math>(x, type, label) - normalizer : not_a_number<Math>();
    }
    Math* const to = reinterpret_cast<Math*>(a.emissions) + ((node.b * (a.frames + a.labels - 1) + node.t + node.u) * a.labels + node.u) * 2;
    to[0] = load_one<Math>(x, type, a.blank) - normalizer;
    to[1] = next;
  }
  // The rest of a packed x has no logarithms.
  if (!a.normalizers || !a.batch_offset) return;
  const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0;
  for (i64 row = (end < 0 ? 0 : end) + (i64)block_x() * block_size_x() + thread_x(); row < a.rows; row += (i64)grid_x() * block_size_x())
    reinterpret_cast<Math*>(a.normalizers)[row] = Math(0);
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
  Math* nodes;            // alpha or beta of the item
  Math* shared;           // [2][labels]; null: nodes are read again
  u32 diagonals;

  struct Edges { Math stay, go; };
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
  GPU_FN Math value(u32 step, u32 u) const {
    if (shared) return shared[step % 2 * (u32)a.labels + u];
    return nodes[(i64)(diagonal(step) - u) * a.labels + u];
  }
  GPU_FN void visit(u32 step, u32 u, const Edges& edges) const {
    const u32 t = diagonal(step) - u;
    const bool can_stay = forward ? t > 0 : t + 1 < item.frames, can_go = forward ? u > 0 : u + 1 < item.labels;
    const Math stay = can_stay ? value(step - 1, u) + edges.stay : minus_infinity<Math>();
    const Math go = can_go ? value(step - 1, forward ? u - 1 : u + 1) + edges.go : minus_infinity<Math>();
    put(step, u, can_stay && can_go ? log_add(stay, go) : can_stay ? stay : go);
  }
  GPU_FN void put(u32 step, u32 u, Math x) const {
    nodes[(i64)(diagonal(step) - u) * a.labels + u] = x;
    if (shared) shared[step % 2 * (u32)a.labels + u] = x;
  }

  GPU_FN void run() const {
    const u32 mine = thread_x(), last = item.labels - 1;
    if (mine == 0) {
      if (forward) put(0, 0, Math(0));
      else put(0, last, emissions[((i64)(diagonals - 1) * a.labels + last) * 2]);
    }
    if (item.labels > block_size_x()) {
      for (u32 step = 1; step < diagonals; ++step) {
        sync_threads();
        for (u32 u = mine; u < item.labels; u += block_size_x())
          if (has(step, u)) visit(step, u, load(step, u));
      }
      return;
    }
    Edges edges[at_once], next[at_once];
    GPU_UNROLL for (int k = 0; k < at_once; ++k) edges[k] = load(1 + k, mine);
    for (u32 first = 1; first < diagonals; first += at_once) {
      GPU_UNROLL for (int k = 0; k < at_once; ++k) next[k] = load(first + at_once + k, mine);
      GPU_UNROLL for (int k = 0; k < at_once; ++k) {
        if (first + k >= diagonals) break;
        sync_threads();
        if (has(first + k, mine)) visit(first + k, mine, edges[k]);
      }
      GPU_UNROLL for (int k = 0; k < at_once; ++k) edges[k] = next[k];
    }
  }
};

template <class Math> GPU_FN void transducer_loss_lattice(const TransducerLossForward& a) {
  GPU_DYNAMIC_SHARED(Math, memory);
  const i64 nodes = a.frames * a.labels, edges = (a.frames + a.labels - 1) * a.labels * 2;
  for (i64 unit = block_x(); unit < 2 * a.batch; unit += grid_x()) {
    const i64 b = unit / 2;
    const TransducerItem item(a, b, 1, 1);
    sync_threads();
    const Math* const emissions = reinterpret_cast<const Math*>(a.emissions) + b * edges;
    Math* const shared = a.shared_diagonals ? memory : nullptr;
    if (unit % 2 == 0) {
      if (!item.bad) TransducerLattice<Math, true>{a, item, emissions, reinterpret_cast<Math*>(a.alpha) + b * nodes, shared, item.frames + item.labels - 1}.run();
      continue;
    }
    Math* const beta = reinterpret_cast<Math*>(a.beta) + b * nodes;
    if (!item.bad) TransducerLattice<Math, false>{a, item, emissions, beta, shared, item.frames + item.labels - 1}.run();
    // The thread that wrote it: the last step is label 0 alone.
    if (thread_x() == 0) store_one(a.loss, a.loss_type, b, item.bad ? not_a_number<Math>() : -beta[0]);
  }
}

// ---- backward ----------------------------------------------------------------------------------------------
// The gradient of a row: of every class, and what the blank and the next label have less.
template <class Math> struct RowGradient {
  Math offset, scale, of_blank, of_label;
  i64 label;

  template <i32 type> GPU_FN void set(const TransducerLossBackward& a, const TransducerItem& item, const TransducerNode& node, i64 row, const u8* x) {
    const i64 item_nodes = node.b * a.frames * a.labels, at = item_nodes + (i64)node.t * a.labels + node.u;
    const Math* const beta = reinterpret_cast<const Math*>(a.beta);
    const Math g = load_one<Math>(a.grad_loss, a.grad_type, node.b * a.grad_stride);
    const Math before = reinterpret_cast<const Math*>(a.alpha)[at] - beta[item_nodes];  // given the labels
    const Math normalizer = a.normalizers ? reinterpret_cast<const Math*>(a.normalizers)[row] : Math(0);
    const bool last_frame = node.t + 1 == item.frames, last_label = node.u + 1 == item.labels;
    offset = before + beta[at] - normalizer;
    scale = a.of_logits ? g : Math(0);
    const Math blank = load_one<Math>(x, type, a.blank) - normalizer;
    of_blank = last_frame ? (last_label ? g * power(before + blank) : Math(0)) : g * power(before + blank + beta[at + a.labels]);
    label = -1;
    of_label = Math(0);
    if (last_label) return;
    label = label_of(a, node.b, node.u);
    const bool inside = (u64)label < (u64)a.classes;
    of_label = inside ? g * power(before + (load_one<Math>(x, type, label) - normalizer) + beta[at + 1]) : not_a_number<Math>();
  }
  GPU_FN Math operator()(Math x) const { return scale == Math(0) ? Math(0) : scale * power(x + offset); }
  GPU_FN Math less(i64 index, i64 blank) const { return (index == blank ? of_blank : Math(0)) + (index == label ? of_label : Math(0)); }

 private:
  GPU_FN static Math power(Math x) { return exp2(x * Math(log2_of_e)); }
};

// Rows [first, end) of the gradient become `value`, by `size` threads.
template <i32 type> GPU_FN void fill_gradient(const TransducerLossBackward& a, i64 first, i64 end, typename Packet<type>::Math value, i64 rank, i64 size) {
  using P = Packet<type>;
  u8* const to = a.grad_x + first * a.classes * P::size;
  const i64 elements = (end - first) * a.classes, past = (i64)((u64)to % 16) / P::size, gap = past ? P::width - past : 0, head = gap < elements ? gap : elements;
  const i64 vectors = (elements - head) / P::width;
  typename P::Math values[P::width];
  GPU_UNROLL for (int i = 0; i < P::width; ++i) values[i] = value;
  for (i64 i = rank; i < head; i += size) store_one(to, type, i, value);
  for (i64 v = rank; v < vectors; v += size) reinterpret_cast<typename P::Raw*>(to + head * P::size)[v] = P::pack_raw(values);
  for (i64 i = head + vectors * P::width + rank; i < elements; i += size) store_one(to, type, i, value);
}

template <i32 type> GPU_FN void transducer_loss_backward(const TransducerLossBackward& a) {
  using P = Packet<type>;
  using Math = typename P::Math;
  using Raw = typename P::Raw;
  constexpr int ahead = 4;
  const LogitTeam team(a.warp_rows);
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
    const auto one = [&](u32 index) { store_one(to, type, index, gradient(load_one<Math>(from, type, index)) - gradient.less(index, a.blank)); };
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
      GPU_UNROLL for (int k = 0; k < ahead; ++k)
        if (v + k * team.size < part.vectors) raw[k] = read[v + k * team.size];
      GPU_UNROLL for (int k = 0; k < ahead; ++k) {
        const u32 at = v + k * team.size;
        if (at >= part.vectors) continue;
        Math x[P::width];
        P::unpack_raw(x, raw[k]);
        GPU_UNROLL for (int i = 0; i < P::width; ++i) x[i] = gradient(x[i]);
        if (at == blank_vector || at == label_vector)
          GPU_UNROLL for (int i = 0; i < P::width; ++i) x[i] -= gradient.less((i64)part.head + at * P::width + i, a.blank);
        write[at] = P::pack_raw(x);
      }
    }
  }
  if (!a.batch_offset) return;
  const i64 end = a.batch ? reinterpret_cast<const i64*>(a.batch_offset)[a.batch - 1] : 0, rest = end < 0 ? 0 : end;
  if (rest < a.rows) fill_gradient<type>(a, rest, a.rows, Math(0), (i64)block_x() * block_size_x() + thread_x(), (i64)grid_x() * block_size_x());
}
#endif
}  // namespace gpu
