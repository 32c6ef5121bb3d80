#include "executor.h"

#include <atomic>

#include "status.h"

namespace {
std::atomic<apex_executor> executor{nullptr};
std::atomic<uint32_t> executor_order{0};
}  // namespace

namespace apex {

bool has_executor() { return executor.load(std::memory_order_relaxed) != nullptr; }

int32_t execute(const char* kernel, apex_dim grid, apex_dim block, uint32_t dynamic_shared_bytes, void** parameters) {
  const apex_executor run = executor.load(std::memory_order_acquire);
  if (!run) return fail(APEX_ERROR_ARGUMENT, "%s cannot be launched on a CPU: no SIMT executor is set", kernel);
  const char* fault = run(kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, dynamic_shared_bytes,
                          executor_order.load(std::memory_order_relaxed), parameters);
  return fault ? fail(APEX_ERROR_EXECUTOR, "%s on the SIMT executor: %s", kernel, fault) : int32_t{APEX_OK};
}

}  // namespace apex

extern "C" void apex_set_executor(apex_executor run, uint32_t order) {
  executor_order.store(order, std::memory_order_relaxed);
  executor.store(run, std::memory_order_release);
}
