// Threads that call one function over and over, without Python's lock in their way.
#include <pthread.h>

#include <atomic>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int count = 4;
pthread_t threads[count];
std::atomic<bool> stop{false};

void* work(void* function) {
  while (!stop.load(std::memory_order_relaxed)) reinterpret_cast<void (*)()>(function)();
  return nullptr;
}

}  // namespace

EXPORT void hammer_start(void (*function)()) {
  stop = false;
  for (pthread_t& thread : threads) pthread_create(&thread, nullptr, work, reinterpret_cast<void*>(function));
}

EXPORT void hammer_stop() {
  stop = true;
  for (pthread_t& thread : threads) pthread_join(thread, nullptr);
}
