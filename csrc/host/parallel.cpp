#include "parallel.h"

#include <atomic>

#include "driver.h"

namespace {
std::atomic<apex_parallel_for> lent{nullptr};
}

namespace apex {
// In a forked child GNU's OpenMP waits for ever for the threads that its parent had, as torch's own operators do.
apex_parallel_for parallel_for_callback() { return is_forked_child() ? nullptr : lent.load(std::memory_order_acquire); }
}  // namespace apex

extern "C" void apex_set_parallel_for(apex_parallel_for parallel_for) {
  lent.store(parallel_for, std::memory_order_release);
}
