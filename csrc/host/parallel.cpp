#include "parallel.h"

#include <atomic>

#include "driver.h"

namespace {
std::atomic<apex_parallel_for> lent{nullptr};

// torch_parallel_for's body takes its context last.
using TorchBody = void (*)(int64_t begin, int64_t end, void* context);
using TorchParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, TorchBody body, void* context);
std::atomic<TorchParallelFor> of_torch{nullptr};

struct Work {
  apex_range_body body;
  void* context;
};

void on_torch_threads(int64_t begin, int64_t end, int64_t grain, apex_range_body body, void* context) {
  Work work{body, context};
  const TorchBody piece = [](int64_t first, int64_t last, void* of) {
    const Work* work = static_cast<const Work*>(of);
    work->body(work->context, first, last);
  };
  of_torch.load(std::memory_order_acquire)(begin, end, grain, piece, &work);
}
}  // namespace

namespace apex {
// In a forked child GNU's OpenMP waits for ever for the threads that its parent had, as torch's own operators do.
apex_parallel_for parallel_for_callback() { return is_forked_child() ? nullptr : lent.load(std::memory_order_acquire); }
}  // namespace apex

extern "C" void apex_set_parallel_for(apex_parallel_for parallel_for) {
  lent.store(parallel_for, std::memory_order_release);
}

extern "C" void apex_lend_torch_threads(void* function) {
  if (function) of_torch.store(reinterpret_cast<TorchParallelFor>(function), std::memory_order_release);
  apex_set_parallel_for(function ? &on_torch_threads : nullptr);
}
