// One block: its threads, barriers, warp exchanges and shared arrays, and the order in which threads run.
#pragma once
#include <string>
#include <vector>
#include "fiber.h"

namespace simt {
struct Warp {
  unsigned live = 0, arrived = 0, generation = 0;
  // Two sets of slots are enough: nobody can post the next value before all have read the last but one.
  unsigned long long slot[2][warp_size];
};

struct SharedArray {
  const void* tag;  // null: the dynamic array
  char* begin;
  size_t bytes;
};

struct Block : Position {
  static constexpr unsigned most_arrays = 64;

  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned live = 0, arrived = 0;
  SharedArray arrays[most_arrays];
  unsigned array_count = 0;  // raised last, so that the race detector never sees half an entry
  void* dynamic = nullptr;
  std::string error;  // of the first fault; the scheduler stops when it is set
  void (*body)(void*) = nullptr;
  void* body_argument = nullptr;

  unsigned threads() const { return block_size.x * block_size.y * block_size.z; }
  void fail(const std::string& what) {
    if (error.empty()) error = what;
  }
};
extern Block* block;  // what `current` points into

// Runs the block from its beginning to the last thread's end, or to the first fault (block.error).
// order 0: threads ascending; 1: descending; else pseudo-random from that seed. In each, one warp runs as far
// as it can before the next starts: round robin would hide what a fast warp does to a slow one.
void run_block(Block& block, size_t dynamic_bytes, unsigned order);

// "thread (3,0,0) of block (1,0,0)"
std::string name_of(const Fiber& fiber);
// "12 threads at barrier line 30; 4 at exchange line 31"
std::string where_threads_wait(const Block& block);

// Set by the race detector where it is linked: forgets what a block's threads did.
extern void (*on_block_end)();
}  // namespace simt
