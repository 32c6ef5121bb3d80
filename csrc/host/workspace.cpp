#include "workspace.h"

#include <cstring>

#include "driver.h"
#include "memory.h"
#include "status.h"

namespace apex {
namespace {
int32_t zero(const apex_place& place, void* memory, int64_t bytes) {
  if (place.platform == APEX_CPU) {
    memset(memory, 0, size_t(bytes));
    return APEX_OK;
  }
  int32_t status = APEX_OK;
  Driver* const driver = open_driver(place.platform, status);
  return driver ? driver->zero(place.device, place.stream, memory, size_t(bytes)) : status;
}
}  // namespace

int32_t take_workspace(const apex_workspace* workspace, int64_t bytes, uint8_t** memory) {
  *memory = nullptr;
  if (bytes == 0) return APEX_OK;
  if (!workspace || !workspace->take) return fail(APEX_ERROR_ARGUMENT, "a workspace is wanted");
  *memory = static_cast<uint8_t*>(workspace->take(workspace->context, uint64_t(bytes)));
  if (!*memory) return fail(APEX_ERROR_WORKSPACE, "the workspace has no %lld bytes", (long long)bytes);
  if (reinterpret_cast<uintptr_t>(*memory) % 16)
    return fail(APEX_ERROR_ARGUMENT, "a workspace must be aligned to 16 bytes");
  return APEX_OK;
}

int32_t take_workspace(const apex_place& place, const apex_workspace* workspace, int64_t bytes, int64_t count,
                       uint8_t** memory, uint32_t** counters) {
  *counters = nullptr;
  if (count > 0) {
    const int32_t capturing = apex_is_capturing(&place);
    if (capturing < 0) return -capturing;
    if (const int32_t status = apex_counters(&place, capturing, size_t(count), counters)) return status;
  }
  if (count == 0 || *counters) return take_workspace(workspace, bytes, memory);
  // A graph zeroes these itself, at every replay.
  const int64_t before = (bytes + 15) / 16 * 16, of_counters = count * int64_t(sizeof(uint32_t));
  if (const int32_t status = take_workspace(workspace, before + of_counters, memory)) return status;
  *counters = reinterpret_cast<uint32_t*>(*memory + before);
  return zero(place, *counters, of_counters);
}
}  // namespace apex
