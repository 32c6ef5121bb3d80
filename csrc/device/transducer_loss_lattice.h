// The transducer loss's second kernel (transducer_loss.h): alpha and beta of every node, and the loss.
#pragma once
#include "transducer_loss.h"

namespace gpu {
#if !defined(GPU_HOST)
// a where the mask is all ones, b where it is 0.
GPU_FN float one_of(u32 mask, float a, float b) {
  return bit_cast<float>((bit_cast<u32>(a) & mask) | (bit_cast<u32>(b) & ~mask));
}
GPU_FN double one_of(u32 mask, double a, double b) {
  const u64 wide = (u64)mask << 32 | mask;
  return bit_cast<double>((bit_cast<u64>(a) & wide) | (bit_cast<u64>(b) & ~wide));
}

// One direction over an item: `forward` from (0, 0), adding up alpha, else from the last node, adding up beta. A node's
// value is the sum over the edge that stays with the labels and the one that goes on, each from or to a node of the
// diagonal before. Place p is label p, or backward the p-th from the last: a thread has one, and at step s of the
// diagonals frame s - p of that direction. It waits for its own last value and for that of the place before, which
// another lane has; where that is another warp's, this one is some steps behind it, and finds them in shared memory.
template <class Math> constexpr int lattice_steps = sizeof(Math) == 8 ? 3 : 8;  // between barriers
template <class Math, bool forward> struct TransducerLattice {
  static constexpr u32 steps = lattice_steps<Math>;
  const TransducerLossForward& a;
  const TransducerItem& item;
  const Math* emissions;  // of the item
  LogP<Math>* nodes;      // alpha or beta of the item
  LogP<Math>* borders;    // [warps][2][steps]: of each warp's last place, before each step

  struct Edges { Math stay, go; };
  GPU_FN u32 diagonals() const { return item.frames + item.labels - 1; }
  GPU_FN u32 label(u32 place) const { return forward ? place : item.labels - 1 - place; }
  GPU_FN bool has(u32 step, u32 place) const { return place < item.labels && step - place < item.frames; }
  // Of nodes; none where `has` says so.
  GPU_FN i64 index(u32 step, u32 place) const {
    const i64 frame = (i64)step - place, t = forward ? frame : item.frames - 1 - frame;
    return t * a.labels + label(place);
  }
  GPU_FN LogP<Math>& node(u32 step, u32 place) const { return nodes[index(step, place)]; }
  // log p of the edges to a node, anything where it has none; the place is an item's. Then `real` ones.
  GPU_FN Edges load(u32 step, u32 place) const {
    const u32 last = diagonals() - 1, s = step < last ? step : last;
    const Math* const diagonal = emissions + (i64)(forward ? s - 1 : last - s) * a.labels * 2;
    const u32 u = label(place), from = forward && u ? u - 1 : u;
    return {diagonal[2 * u], diagonal[2 * from + 1]};
  }
  GPU_FN Edges real(const Edges& edges, u32 step, u32 place) const {
    return {step > place ? edges.stay : minus_infinity<Math>(), place ? edges.go : minus_infinity<Math>()};
  }
  GPU_FN LogP<Math> sum(const LogP<Math>& own, const LogP<Math>& beside, const Edges& edges) const {
    return log_add(own.then(in_parts(edges.stay)), beside.then(in_parts(edges.go)));
  }
  GPU_FN LogP<Math> start() const {
    return forward ? LogP<Math>{} : in_parts(emissions[((i64)(diagonals() - 1) * a.labels + item.labels - 1) * 2]);
  }

  GPU_FN void run() const {
    if (item.labels > block_size_x()) return run_from_memory();
    const u32 place = thread_x(), warp = warp_uniform(place / warp_size), warps = block_size_x() / warp_size;
    const u32 inside = place < item.labels ? place : item.labels - 1;
    const u32 turns = tiles_of(diagonals() - 1, steps);
    LogP<Math> own = impossible<Math>();
    if (place == 0) node(0, 0) = own = start();
    Edges edges[steps];
    if (turns)
      GPU_UNROLL_FOR (u32 k = 0; k < steps; ++k) edges[k] = real(load(1 + k, inside), 1 + k, place);
    for (u32 now = 0; now < turns + warps - 1; ++now) {
      if (now) sync_threads();
      const u32 turn = now - warp;
      if (turn < turns) {
        LogP<Math> before[steps] = {};
        if (warp)
          GPU_UNROLL_FOR (u32 k = 0; k < steps; ++k) before[k] = borders[((warp - 1) * 2 + turn % 2) * steps + k];
        advance(own, edges, before, turn, place, inside, borders + (warp * 2 + turn % 2) * steps);
      }
    }
  }
  // The steps of a turn.
  GPU_FN void advance(LogP<Math>& own, Edges (&edges)[steps], const LogP<Math> (&before)[steps], u32 turn, u32 place,
                      u32 inside, LogP<Math>* border) const {
    // Conditions on the lane are masks: by branches the compiler would split the warp for all of the steps.
    const u32 lane = lane_id(), first = 1 + turn * steps, side = (lane - 1) % warp_size;
    const u32 is_first = pinned(lane ? 0 : ~0u);
    Edges next[steps];
    GPU_UNROLL_FOR (u32 k = 0; k < steps; ++k) next[k] = load(first + steps + k, inside);
    LogP<Math> mine[steps];
    i64 at = index(first, place);
    GPU_UNROLL_FOR (u32 k = 0; k < steps; ++k) {
      const u32 step = first + k;
      const LogP<Math> beside{one_of(is_first, before[k].whole, shuffle_value_from(own.whole, side)),
                              one_of(is_first, before[k].rest, shuffle_value_from(own.rest, side))};
      mine[k] = own;
      const LogP<Math> here = sum(own, beside, edges[k]);
      const bool is_node = has(step, place);
      if (is_node) nodes[at] = here;
      own.whole = is_node ? here.whole : own.whole;
      own.rest = is_node ? here.rest : own.rest;
      at += forward ? a.labels : -a.labels;
    }
    if (lane == warp_size - 1)
      GPU_UNROLL_FOR (u32 k = 0; k < steps; ++k) border[k] = mine[k];
    // Now, when they have long arrived: later, a wait for them would be one for those after them.
    GPU_UNROLL_FOR (u32 k = 0; k < steps; ++k) edges[k] = real(next[k], first + steps + k, place);
  }
  // More labels than threads: what was before is read again.
  GPU_FN void run_from_memory() const {
    if (thread_x() == 0) node(0, 0) = start();
    for (u32 step = 1; step < diagonals(); ++step) {
      sync_threads();
      for (u32 place = thread_x(); place < item.labels; place += block_size_x()) {
        if (!has(step, place)) continue;
        LogP<Math> own = impossible<Math>(), beside = own;
        if (step > place) own = node(step - 1, place);
        if (place) beside = node(step - 1, place - 1);
        node(step, place) = sum(own, beside, real(load(step, place), step, place));
      }
    }
  }
};

template <class Math> GPU_FN void transducer_loss_lattice(const TransducerLossForward& a) {
  GPU_SHARED(LogP<Math>, borders, transducer_lattice_threads / warp_size * 2 * lattice_steps<Math>);
  const i64 nodes = a.frames * a.labels, edges = (a.frames + a.labels - 1) * a.labels * 2;
  for (i64 unit = block_x(); unit < 2 * a.batch; unit += grid_x()) {
    const i64 b = unit / 2;
    const TransducerItem item(a, b, 1, 1);
    const Math* const emissions = reinterpret_cast<const Math*>(a.emissions) + b * edges;
    LogP<Math>* const beta = reinterpret_cast<LogP<Math>*>(a.beta) + b * nodes;
    LogP<Math>* const alpha = reinterpret_cast<LogP<Math>*>(a.alpha) + b * nodes;
    if (!item.bad && unit % 2 == 0) TransducerLattice<Math, true>{a, item, emissions, alpha, borders}.run();
    if (!item.bad && unit % 2) TransducerLattice<Math, false>{a, item, emissions, beta, borders}.run();
    sync_threads();
    if (unit % 2 && thread_x() == 0)
      store_one(a.loss, a.loss_type, b, item.bad ? not_a_number<Math>() : -(beta[0].whole + beta[0].rest));
  }
}
#endif
}  // namespace gpu
