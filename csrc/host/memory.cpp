// The arena of each device, which hands out memory that outlives calls.
#include "memory.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"
#include "os.h"
#include "status.h"
#include "table.h"

namespace apex {
namespace {

constexpr size_t alignment = 512, slab_bytes = size_t{2} << 20;
constexpr size_t eager_counters = 4096;      // a stream has at least
constexpr size_t captured_counters = 65536;  // a device has
constexpr size_t counters_apart = 32;        // so that launches share no cache line

struct Counters {
  void* memory = nullptr;
  size_t count = 0;
};

struct Arena {
  char* slab = nullptr;  // the newest one: zeroed, handed out from its start
  size_t left = 0;
  std::map<std::pair<void*, size_t>, std::vector<void*>> idle;  // given back, by stream and size
  std::map<void*, Counters> counters;                           // by stream
  Counters captured;
  size_t captured_used = 0;
};

// Never destroyed, so that what static destructors give back finds it. The mutex is held while the driver makes
// memory, which is rare. It is taken only where a driver is open, so a forked child never waits for a thread that it
// has not.
std::mutex mutex;
Arena& arena_of(const apex_place& place) {
  static auto& arenas = *new std::map<std::pair<int32_t, int32_t>, Arena>;
  return arenas[{place.platform, place.device}];
}

// Powers of two: a block fits again where a plan of about the same size follows.
size_t rounded(size_t bytes) {
  size_t size = alignment;
  while (size < bytes) size *= 2;
  return size;
}

// Zeroed memory that was never handed out.
int32_t take_fresh(Driver& driver, Arena& arena, int32_t device, size_t bytes, void** memory) {
  if (bytes > slab_bytes / 2) return driver.allocate(device, bytes, memory);
  if (bytes > arena.left) {
    void* slab = nullptr;
    if (const int32_t status = driver.allocate(device, slab_bytes, &slab)) return status;
    if (!slab) return APEX_OK;
    arena.slab = static_cast<char*>(slab);
    arena.left = slab_bytes;
  }
  *memory = arena.slab;
  arena.slab += bytes;
  arena.left -= bytes;
  return APEX_OK;
}

// `bytes` as rounded() gives them.
int32_t take(Driver& driver, Arena& arena, const apex_place& place, size_t bytes, bool zeroed, void** memory) {
  const auto idle = arena.idle.find({place.stream, bytes});
  if (idle == arena.idle.end() || idle->second.empty()) return take_fresh(driver, arena, place.device, bytes, memory);
  void* const again = idle->second.back();
  if (zeroed)
    if (const int32_t status = driver.zero(place.device, place.stream, again, bytes)) return status;
  idle->second.pop_back();
  *memory = again;
  return APEX_OK;
}

int32_t counters_of_stream(Driver& driver, const apex_place& place, size_t count, uint32_t** found) {
  const std::lock_guard<std::mutex> lock(mutex);
  Arena& arena = arena_of(place);
  Counters& known = arena.counters[place.stream];
  if (known.count < count) {
    const size_t bytes = rounded(std::max(eager_counters, count) * sizeof(uint32_t));
    void* memory = nullptr;
    if (const int32_t status = take(driver, arena, place, bytes, true, &memory)) return status;
    if (!memory) return APEX_OK;
    if (known.memory) arena.idle[{place.stream, known.count * sizeof(uint32_t)}].push_back(known.memory);
    known = {memory, bytes / sizeof(uint32_t)};
  }
  *found = static_cast<uint32_t*>(known.memory);
  return APEX_OK;
}

int32_t counters_of_graph(Driver& driver, const apex_place& place, size_t count, uint32_t** found) {
  const std::lock_guard<std::mutex> lock(mutex);
  Arena& arena = arena_of(place);
  if (count > captured_counters - arena.captured_used) return APEX_OK;
  if (!arena.captured.memory) {
    void** const memory = &arena.captured.memory;
    if (const int32_t status = take_fresh(driver, arena, place.device, captured_counters * sizeof(uint32_t), memory))
      return status;
    if (!*memory) return APEX_OK;
  }
  *found = static_cast<uint32_t*>(arena.captured.memory) + arena.captured_used;
  const size_t used = arena.captured_used + (count + counters_apart - 1) / counters_apart * counters_apart;
  arena.captured_used = std::min(used, captured_counters);
  return APEX_OK;
}

// Kernels run on the CPU in the executor of the tests alone.
uint32_t* counters_of_thread(size_t count) {
  thread_local std::vector<uint32_t> counters;
  if (counters.size() < count) counters.assign(count, 0);
  return counters.data();
}

int32_t open(const char* what, const apex_place* place, Driver** driver) {
  if (!place || place->platform == APEX_CPU || !is_place(place->platform, place->device))
    return fail(APEX_ERROR_ARGUMENT, "%s: there is no such place", what);
  int32_t status = APEX_OK;
  *driver = open_driver(place->platform, status);
  return *driver ? int32_t{APEX_OK} : status;
}

}  // namespace
}  // namespace apex

extern "C" {

int32_t apex_counters(const apex_place* place, int32_t capturing, size_t count, uint32_t** counters) {
  using namespace apex;
  return guarded([&] {
    *counters = nullptr;
    if (place && place->platform == APEX_CPU) {
      *counters = counters_of_thread(count);
      return int32_t{APEX_OK};
    }
    Driver* driver;
    if (const int32_t status = open("apex_counters", place, &driver)) return status;
    return (capturing ? counters_of_graph : counters_of_stream)(*driver, *place, count, counters);
  });
}

int32_t apex_take_memory(const apex_place* place, size_t bytes, int32_t zeroed, void** memory) {
  using namespace apex;
  return guarded([&] {
    *memory = nullptr;
    if (place && place->platform == APEX_CPU) {
      *memory = os::allocate_aligned(alignment, rounded(bytes));
      if (!*memory) throw std::bad_alloc();
      if (zeroed) memset(*memory, 0, bytes);
      return int32_t{APEX_OK};
    }
    Driver* driver;
    if (const int32_t status = open("apex_take_memory", place, &driver)) return status;
    bool capturing = false;
    if (const int32_t status = driver->is_capturing(place->device, place->stream, &capturing)) return status;
    if (capturing) return int32_t{APEX_OK};
    const std::lock_guard<std::mutex> lock(mutex);
    return take(*driver, arena_of(*place), *place, rounded(bytes), zeroed, memory);
  });
}

void apex_give_memory_back(const apex_place* place, size_t bytes, void* memory) {
  using namespace apex;
  if (!memory || !place) return;
  if (place->platform == APEX_CPU) return os::free_aligned(memory);
  // A forked child has no use of what its parent took.
  if (!is_place(place->platform, place->device) || !opened_driver(place->platform)) return;
  guarded([&] {
    const std::lock_guard<std::mutex> lock(mutex);
    arena_of(*place).idle[{place->stream, rounded(bytes)}].push_back(memory);
    return int32_t{APEX_OK};
  });
}
}
