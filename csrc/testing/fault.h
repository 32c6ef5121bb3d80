// What ends a kernel from outside: memory faults and the time limit, both as signals of this thread.
#pragma once
#include "block.h"

namespace simt {
extern double time_limit_seconds;  // of this thread's CPU time, a launch

// From construction to destruction, faults in kernel code become errors of the launch. Under
// AddressSanitizer memory faults stay the sanitizer's: it reports them better.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
};

// After a fiber came back to the scheduler: if a fault brought it, puts that into block.error.
bool take_fault(const Fiber& fiber, Block& block);

// "function at file:line" where addr2line can tell, else the library and the offset in it.
std::string describe_code(const void* pc);
}  // namespace simt
