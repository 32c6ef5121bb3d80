// IPC of the fake drivers, within one process: a handle holds the address, and what is opened must be closed.
#pragma once
#include "memory.h"

namespace fake {

struct Handle { char bytes[64]; };
constexpr char magic[] = "a handle";
inline std::set<void*> opened;

inline bool get(Handle* handle, void* memory) {
  Lock lock(mutex);
  if (!live.count(memory)) return false;
  memset(handle, 0, sizeof *handle);
  memcpy(handle->bytes, magic, sizeof magic);
  memcpy(handle->bytes + 16, &memory, sizeof memory);
  return true;
}
// Not twice, as CUDA's.
inline bool open(void** memory, const Handle& handle, unsigned flags) {
  Lock lock(mutex);
  if (flags != 1 || memcmp(handle.bytes, magic, sizeof magic) != 0) return false;
  memcpy(memory, handle.bytes + 16, sizeof *memory);
  return live.count(*memory) && opened.insert(*memory).second;
}
inline bool close(void* memory) {
  Lock lock(mutex);
  return opened.erase(memory) != 0;
}

}  // namespace fake

FAKE size_t fake_opened() { return fake::opened.size(); }
