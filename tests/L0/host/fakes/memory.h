// Device memory of the fake drivers: malloc'ed and never zero by itself. What is queued on a stream happens when
// that stream is waited for or launched on, or the test lets it (fake_run); what is queued while the stream captures
// goes into the graph and does not happen.
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <set>
#include <vector>

#include "fake.h"

namespace fake {

constexpr int kOutOfMemory = 2;
constexpr std::align_val_t alignment{512};

struct Pending {
  void* memory;
  unsigned char value;
  size_t bytes;
};

inline std::set<void*> live;
inline size_t room = size_t(1) << 30;                 // bytes that can still be allocated
inline int slowness = 0;                              // microseconds that an allocation takes
inline std::map<void*, std::vector<Pending>> queued;  // by stream

inline int allocate(void** memory, size_t bytes) {
  if (slowness) usleep(slowness);
  Lock lock(mutex);
  if (bytes > room) return kOutOfMemory;
  room -= bytes;
  *memory = ::operator new(bytes, alignment);
  memset(*memory, 0xab, bytes);
  live.insert(*memory);
  return 0;
}
// Whether it was allocated.
inline bool release(void* memory) {
  Lock lock(mutex);
  if (!live.erase(memory)) return false;
  ::operator delete(memory, alignment);
  return true;
}
inline void queue(void* stream, const Pending& work) {
  Lock lock(mutex);
  queued[stream].push_back(work);
}
inline void run(void* stream) {
  Lock lock(mutex);
  for (const Pending& work : queued[stream]) memset(work.memory, work.value, work.bytes);
  queued[stream].clear();
}

}  // namespace fake

FAKE void fake_run(void* stream) { fake::run(stream); }
FAKE size_t fake_live() { return fake::live.size(); }
FAKE void fake_set_room(size_t bytes) { fake::room = bytes; }
FAKE void fake_set_slowness(int microseconds) { fake::slowness = microseconds; }
