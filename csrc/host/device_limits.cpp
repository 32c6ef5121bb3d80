#include "device_limits.h"

#include <atomic>

#include "table.h"

namespace apex {
namespace {
// Devices do not change while a process runs. 0: not asked yet; two threads that ask together get the same.
std::atomic<uint64_t> known[platforms][max_devices];
}  // namespace

int32_t device_limits(const apex_place& place, DeviceLimits* limits) {
  if (place.platform == APEX_CPU) {
    *limits = {2, 32, 64, 48 << 10};
    return APEX_OK;
  }
  auto& slot = known[place.platform][place.device];
  uint64_t packed = slot.load(std::memory_order_relaxed);
  if (!packed) {
    apex_device_info info;
    if (const int32_t status = apex_get_device_info(place.platform, place.device, &info)) return status;
    packed =
        uint64_t(info.shared_bytes_per_block) << 32 | uint64_t(info.multiprocessors) << 8 | uint64_t(info.warp_size);
    slot.store(packed, std::memory_order_relaxed);
  }
  *limits = {int32_t(packed >> 8 & 0xffffff), int32_t(packed & 0xff), int32_t(packed & 0xff), int64_t(packed >> 32)};
  return APEX_OK;
}
}  // namespace apex
