#include "parallel.h"

#include <atomic>

namespace {
std::atomic<apex_parallel_for> lent{nullptr};
}

namespace apex {
apex_parallel_for parallel_for_callback() { return lent.load(std::memory_order_acquire); }
} // namespace apex

extern "C" void apex_set_parallel_for(apex_parallel_for parallel_for) {
  lent.store(parallel_for, std::memory_order_release);
}
