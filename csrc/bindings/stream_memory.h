// Memory that outlives a call, of one stream: libapex's own (host/memory.h), never torch's allocator's, whose memory
// belongs to a graph while one is warmed up or captured.
#pragma once
#include <cstddef>
#include <utility>

#include "host/memory.h"
#include "status.h"

namespace apex {
class StreamMemory {
 public:
  StreamMemory() = default;
  // Empty where there is none: while the place's stream captures, or on a full device.
  StreamMemory(const apex_place& place, size_t bytes, bool zeroed, const char* op) : place_(place), bytes_(bytes) {
    use_reference(apex_take_memory(&place, bytes, zeroed, &memory_), op);
  }
  StreamMemory(StreamMemory&& other) noexcept { swap(other); }
  StreamMemory& operator=(StreamMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~StreamMemory() { apex_give_memory_back(&place_, bytes_, memory_); }

  void* data() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(StreamMemory& other) {
    std::swap(place_, other.place_);
    std::swap(bytes_, other.bytes_);
    std::swap(memory_, other.memory_);
  }

  apex_place place_{};
  size_t bytes_ = 0;
  void* memory_ = nullptr;
};
}  // namespace apex
