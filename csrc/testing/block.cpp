#include "block.h"
#include <cstdlib>
#include <map>
#include "fault.h"

namespace simt {
const Position* current = nullptr;
Block* block = nullptr;
void (*on_block_end)() = nullptr;
volatile bool in_atomic = false;

namespace {
Fiber& me() { return *static_cast<Fiber*>(self); }
std::string text(unsigned n) { return std::to_string(n); }
std::string text(const Dim& d) { return "(" + text(d.x) + "," + text(d.y) + "," + text(d.z) + ")"; }

// Wakes fibers [begin, end) that wait in `state`, if the last one that must come has come.
template <class Count> bool release(State state, unsigned begin, unsigned end, const char* what, Count&& count) {
  Block& b = *block;
  int line = 0;
  for (unsigned i = begin; i < end; ++i) {
    Fiber& f = b.fibers[i];
    if (f.state != state) continue;
    if (line && f.line != line)
      b.fail(std::string(what) + " lines " + std::to_string(line) + " and " + std::to_string(f.line));
    line = f.line;
    f.state = State::ready;
    count(f);
  }
  return true;
}

void release_barrier_if_full() {
  Block& b = *block;
  if (!b.arrived || b.arrived != b.live) return;
  release(State::at_barrier, 0, b.threads(), "barrier divergence: threads of one block wait at",
          [](Fiber& f) { ++f.barriers; });
  b.arrived = 0;
}

void release_warp_if_full(Warp& warp, unsigned index) {
  if (!warp.arrived || warp.arrived != warp.live) return;
  const unsigned begin = index * warp_size, n = block->threads(), end = begin + warp_size < n ? begin + warp_size : n;
  release(State::at_exchange, begin, end, "warp divergence: lanes of one warp exchange at", [](Fiber&) {});
  warp.arrived = 0;
  ++warp.generation;
  for (auto& slot : warp.slot[warp.generation & 1]) slot = absent;
}

// Posts a value and waits for the warp; the slots then hold every live lane's value.
const unsigned long long* meet(unsigned long long value, int line) {
  Fiber& f = me();
  Warp& warp = block->warps[f.warp];
  auto& slots = warp.slot[warp.generation & 1];
  slots[f.lane] = value;
  f.state = State::at_exchange;
  f.line = line;
  ++warp.arrived;
  release_warp_if_full(warp, f.warp);
  if (f.state != State::ready || !block->error.empty()) suspend(false);  // the last to come goes straight on
  return slots;
}

void thread_main() {
  in_kernel = true;
  block->body(block->body_argument);
  in_kernel = false;
  Fiber& f = me();
  f.state = State::done;
  // A thread that left no longer keeps the others waiting.
  Warp& warp = block->warps[f.warp];
  --block->live;
  --warp.live;
  release_warp_if_full(warp, f.warp);
  release_barrier_if_full();
  suspend(true);
}

void* allocate_shared(size_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 16, bytes ? bytes : 1)) return nullptr;
  memset(p, 0xff, bytes);
  return p;
}

void* add_shared(Block& b, const void* tag, size_t bytes) {
  if (b.array_count == Block::most_arrays) return nullptr;
  void* p = allocate_shared(bytes);
  if (!p) return nullptr;
  b.arrays[b.array_count] = {tag, static_cast<char*>(p), bytes};
  ++b.array_count;
  return p;
}

struct Random {
  unsigned state;
  unsigned below(unsigned n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % n;
  }
};
void shuffle(std::vector<unsigned>& v, Random& random) {
  for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[random.below(static_cast<unsigned>(i))]);
}

// The warps in the order in which they get their turn, and the lanes inside a warp.
struct Order {
  std::vector<unsigned> warps, lanes;
  Random random;
  bool shuffled;

  Order(unsigned warp_count, unsigned order)
      : warps(warp_count), lanes(warp_size), random{order * 2654435761u}, shuffled(order > 1) {
    for (unsigned i = 0; i < warp_count; ++i) warps[i] = order == 1 ? warp_count - 1 - i : i;
    for (unsigned i = 0; i < warp_size; ++i) lanes[i] = order == 1 ? warp_size - 1 - i : i;
  }
  void next_round() {
    if (!shuffled) return;
    shuffle(warps, random);
    shuffle(lanes, random);
  }
};

void start_threads(Block& b) {
  const unsigned n = b.threads();
  b.warps.assign((n + warp_size - 1) / warp_size, Warp());
  for (Warp& w : b.warps)
    for (auto& half : w.slot)
      for (auto& slot : half) slot = absent;
  for (unsigned i = 0; i < n; ++i) {
    Fiber& f = b.fibers[i];
    f.thread = {i % b.block_size.x, i / b.block_size.x % b.block_size.y, i / (b.block_size.x * b.block_size.y)};
    f.lane = i % warp_size;
    f.warp = i / warp_size;
    ++b.warps[f.warp].live;
    if (!prepare(f, &thread_main)) return b.fail("no memory for the stack of " + name_of(f));
  }
  b.live = n;
  b.arrived = 0;
}

// Runs the warp's threads until none is ready. True: one ran.
bool run_warp(Block& b, unsigned warp, const std::vector<unsigned>& lanes) {
  const unsigned begin = warp * warp_size, n = b.threads();
  bool ran = false;
  for (bool again = true; again && b.error.empty();) {
    again = false;
    for (unsigned lane : lanes) {
      if (begin + lane >= n) continue;
      Fiber& f = b.fibers[begin + lane];
      if (f.state != State::ready) continue;
      ran = again = true;
      resume(f);
      if (take_fault(f, b) || !b.error.empty()) return true;
    }
  }
  return ran;
}

void run_threads(Block& b, unsigned order) {
  Order turn(static_cast<unsigned>(b.warps.size()), order);
  while (b.live && b.error.empty()) {
    turn.next_round();
    bool ran = false;
    for (unsigned warp : turn.warps) {
      ran |= run_warp(b, warp, turn.lanes);
      if (!b.error.empty()) return;
    }
    if (!ran && b.live) b.fail("deadlock: " + where_threads_wait(b));
  }
}
}  // namespace

void barrier(int line) {
  ExecutorCode scope;
  Fiber& f = me();
  f.state = State::at_barrier;
  f.line = line;
  ++block->arrived;
  release_barrier_if_full();
  suspend(false);
}

void warp_barrier(int line) {
  ExecutorCode scope;
  meet(0, line);
  ++me().warp_barriers;
}

unsigned long long exchange(unsigned long long value, unsigned from_lane, int line) {
  ExecutorCode scope;
  const unsigned long long* slots = meet(value, line);
  return from_lane < warp_size ? slots[from_lane] : absent;
}

unsigned long long ballot(bool predicate, int line) {
  ExecutorCode scope;
  const unsigned long long* slots = meet(predicate, line);
  unsigned long long mask = 0;
  for (unsigned lane = 0; lane < warp_size; ++lane) mask |= static_cast<unsigned long long>(slots[lane] == 1) << lane;
  return mask;
}

void* shared(const void* tag, size_t bytes) {
  ExecutorCode scope;
  Block& b = *block;
  for (unsigned i = 0; i < b.array_count; ++i)
    if (b.arrays[i].tag == tag) return b.arrays[i].begin;
  if (void* p = add_shared(b, tag, bytes)) return p;
  b.fail("no room for a shared array of " + std::to_string(bytes) + " bytes");
  suspend(true);
  return nullptr;  // not reached: the launch ends
}

void* dynamic_shared() { return block->dynamic; }

void run_block(Block& b, size_t dynamic_bytes, unsigned order) {
  if (dynamic_bytes && !(b.dynamic = add_shared(b, nullptr, dynamic_bytes))) {
    b.fail("no memory for " + std::to_string(dynamic_bytes) + " bytes of dynamic shared memory");
    return;
  }
  start_threads(b);
  if (b.error.empty()) run_threads(b, order);
  if (on_block_end) on_block_end();
  while (b.array_count) free(b.arrays[--b.array_count].begin);
  b.dynamic = nullptr;
}

std::string name_of(const Fiber& f) { return "thread " + text(f.thread) + " of block " + text(block->block); }

std::string where_threads_wait(const Block& b) {
  std::map<std::pair<int, int>, unsigned> waiting;
  for (unsigned i = 0; i < b.threads(); ++i) {
    const Fiber& f = b.fibers[i];
    if (f.state == State::at_barrier || f.state == State::at_exchange) ++waiting[{static_cast<int>(f.state), f.line}];
  }
  std::string s;
  for (const auto& [place, count] : waiting) {
    const bool at_barrier = place.first == static_cast<int>(State::at_barrier);
    s += (s.empty() ? "" : "; ") + text(count) + " threads at " + (at_barrier ? "barrier" : "exchange") + " line " +
         std::to_string(place.second);
  }
  return s;
}
}  // namespace simt
