// Fibers of the executor: stacks, and the switch between one of them and the scheduler.
#pragma once
#include <cstdint>
#include "simt.h"
#if defined(SIMT_UCONTEXT) || !defined(__x86_64__)
#include <ucontext.h>
#define SIMT_USES_UCONTEXT 1
#endif
#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#endif

namespace simt {
enum class State : uint8_t { ready, at_barrier, at_exchange, done };

struct Fiber : Thread {
#if SIMT_USES_UCONTEXT
  ucontext_t context;
#else
  void* context = nullptr;  // its stack pointer while it is off; what it pushed lies there
#endif
  char* stack = nullptr;
  void* used_from = nullptr;   // the lowest stack address of its last run, for AddressSanitizer
  void* fake_stack = nullptr;  // AddressSanitizer's, while the fiber is off
  State state = State::done;
  int line = 0;           // of the barrier or exchange it waits in
  unsigned barriers = 0;  // passed so far: the race detector's clocks
  unsigned warp_barriers = 0;
};

// Set while kernel code runs, clear in the executor's own code: a signal may end a kernel anywhere, but the
// executor (which allocates memory) only between its own steps.
extern volatile bool in_kernel;
struct ExecutorCode {
  ExecutorCode() { in_kernel = false; }
  ~ExecutorCode() { in_kernel = true; }
};

// Readies the fiber to run entry() from its beginning. Its stack is made at first use and kept.
// False: no memory.
bool prepare(Fiber& fiber, void (*entry)());
// From the scheduler into the fiber, until it suspends.
void resume(Fiber& fiber);
// From the fiber into the scheduler. `last`: it will not be resumed.
void suspend(bool last);
// From a signal handler that interrupted the running fiber at `stack_pointer`: drop it, go to the scheduler.
[[noreturn]] void abandon(void* stack_pointer);
// Lowest and highest address of the fiber's guard page (an access there is a stack overflow).
bool in_guard(const Fiber& fiber, const void* address);
}  // namespace simt
