// Opening a driver once, and what fork() means for it.
#include "driver.h"

#include <atomic>
#include <mutex>

#include "os.h"
#include "status.h"
#include "table.h"

namespace apex {
namespace {

std::mutex opening;
struct State {
  std::atomic<Driver*> driver{nullptr};
  std::atomic<int> used{0};    // threads that are opening it, and one for ever once it is open
  std::atomic<int> parent{0};  // in a forked child: the process that had opened it
};
State states[platforms];
std::atomic<bool> forked{false};

// The table's mutex is held through fork(), so that the child's copy is whole: its CPU variants go on
// working. `opening` needs no such care: a child whose parent may have held it never takes it (`used`).
void before_fork() { lock_table(); }
void after_fork_in_parent() { unlock_table(); }
void after_fork_in_child() {
  unlock_table();
  forked.store(true, std::memory_order_relaxed);
  for (State& state : states) {
    if (state.used.load(std::memory_order_relaxed) == 0) continue;
    state.driver.store(nullptr, std::memory_order_relaxed);
    if (!state.parent.load(std::memory_order_relaxed))
      state.parent.store(os::parent_process_id(), std::memory_order_relaxed);
  }
}

__attribute__((constructor)) void watch_forks() {
  os::watch_forks(before_fork, after_fork_in_parent, after_fork_in_child);
}

[[gnu::cold]] Driver* open_first(int32_t platform, int32_t& status) {
  State& state = states[platform];
  if (const int parent = state.parent.load(std::memory_order_relaxed)) {
    const char* word = platform == APEX_HIP ? "HIP" : "CUDA";
    status = fail(APEX_ERROR_FORKED,
                  "%s was already in use in process %d when it forked this one (%d), and no GPU driver works in a "
                  "forked child. Start workers with the 'spawn' or 'forkserver' method of multiprocessing, or use "
                  "%s first after the fork.",
                  word, parent, os::process_id(), word);
    return nullptr;
  }
  state.used.fetch_add(1);
  Driver* driver;
  {
    std::lock_guard<std::mutex> lock(opening);
    driver = state.driver.load(std::memory_order_acquire);
    if (driver) {
      state.used.fetch_sub(1);
      return driver;
    }
    driver = platform == APEX_HIP ? open_hip(status) : open_cuda(status);
    state.driver.store(driver, std::memory_order_release);
  }
  if (!driver) state.used.fetch_sub(1);
  return driver;
}

}  // namespace

Driver* opened_driver(int32_t platform) { return states[platform].driver.load(std::memory_order_acquire); }

Driver* open_driver(int32_t platform, int32_t& status) {
  if (Driver* driver = opened_driver(platform)) return driver;
  return open_first(platform, status);
}

bool is_forked_child() { return forked.load(std::memory_order_relaxed); }

}  // namespace apex
