#include "push_pull_halos.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "device_limits.h"
#include "driver.h"
#include "status.h"

namespace apex {
namespace {
constexpr const char* unit = "push_pull_halos";
// By the logarithm of an element's bytes.
apex_kernel kernels[] = {{unit, "push_pull_halos_u8", 0, 0},
                         {unit, "push_pull_halos_u16", 0, 0},
                         {unit, "push_pull_halos_u32", 0, 0},
                         {unit, "push_pull_halos_u64", 0, 0}};
apex_kernel delay = {unit, "push_pull_halos_delay", 0, 0};

int32_t kernel_of(int32_t unit_bytes) {
  for (int32_t i = 0; i < 4; ++i)
    if (unit_bytes == 1 << i) return i;
  return -1;
}

// There is no reference of what moves memory: where that is asked for, a CPU does it as ever.
int32_t choose(const apex_place& place, int32_t* variant) {
  const int32_t status = choose_variant(place, unit, variant);
  if (status != APEX_USE_REFERENCE || place.platform != APEX_CPU) return status;
  *variant = APEX_VARIANT_CPU;
  return APEX_OK;
}

bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Strips, slots and rounds, from the halo's size and the inbox's alone: both sides come to the same.
int32_t cut(gpu::PushPullHalos& a) {
  int64_t elements = 1;
  for (const uint32_t size : a.sizes) {
    elements *= size;
    if (elements > 0x7fffffff) return fail(APEX_ERROR_VALUE, "%s: a halo has at most 2^31 - 1 elements", unit);
  }
  const int64_t packets = ceil_divide(elements * a.unit_bytes, 8);
  a.strip_bytes = static_cast<uint32_t>(std::min<int64_t>(gpu::halo_strip_bytes, a.box_bytes / 16 * 16));
  if (a.strip_bytes < 48)
    return fail(APEX_ERROR_VALUE, "%s: a transfer buffer must hold 48 bytes, not %lld", unit,
                static_cast<long long>(a.box_bytes));
  a.slots = std::min(gpu::most_halo_slots, (a.strip_bytes - 16) / 32);
  a.strips = static_cast<uint32_t>(std::min<int64_t>(a.box_bytes / a.strip_bytes, ceil_divide(packets, a.slots)));
  a.rounds = a.strips ? static_cast<uint32_t>(ceil_divide(packets, int64_t(a.strips) * a.slots)) : 0;
  for (const void* box : {a.top_inbox, a.top_outbox, a.bottom_inbox, a.bottom_outbox})
    if (!aligned(box, 16)) return fail(APEX_ERROR_VALUE, "%s: transfer buffers begin at multiples of 16 bytes", unit);
  return APEX_OK;
}

// Blocks for both sides, all of which run at once.
int32_t blocks_of(const apex_place& place, apex_kernel* kernel, const gpu::PushPullHalos& a, int32_t multiprocessors,
                  uint32_t* blocks) {
  DeviceLimits limits;
  if (const int32_t status = device_limits(place, &limits)) return status;
  int32_t resident = 0;
  if (const int32_t status = blocks_at_once(place, kernel, gpu::halo_threads, 0, &resident)) return status;
  const int64_t all = limits.multiprocessors;
  const int64_t used = multiprocessors > 0 ? std::min<int64_t>(multiprocessors, all) : all;
  const int64_t most = std::max<int64_t>(2, used * std::max(resident, 1) / 2 * 2);
  *blocks = static_cast<uint32_t>(std::min<int64_t>(most, 2 * int64_t(a.strips)));
  return APEX_OK;
}
}  // namespace
}  // namespace apex

int32_t apex_push_pull_halos(const apex_place* place, const gpu::PushPullHalos* arguments, int32_t multiprocessors) {
  using namespace apex;
  gpu::PushPullHalos a = *arguments;
  const int32_t which = kernel_of(a.unit_bytes);
  if (which < 0) return fail(APEX_ERROR_ARGUMENT, "%s: elements have 1, 2, 4 or 8 bytes, not %d", unit, a.unit_bytes);
  if (const int32_t status = cut(a)) return status;
  int32_t variant;
  if (const int32_t status = choose(*place, &variant)) return status;
  if (a.strips == 0) return APEX_OK;
  if (variant == APEX_VARIANT_CPU) {
    push_pull_halos_cpu(a);
    return APEX_OK;
  }
  uint32_t blocks;
  if (const int32_t status = blocks_of(*place, &kernels[which], a, multiprocessors, &blocks)) return status;
  void* parameters[] = {&a};
  return apex_launch(place, &kernels[which], {blocks, 1, 1}, {gpu::halo_threads, 1, 1}, 0, parameters);
}

int32_t apex_add_delay(const apex_place* place, int64_t nanoseconds) {
  using namespace apex;
  int32_t variant;
  if (const int32_t status = choose(*place, &variant)) return status;
  if (variant == APEX_VARIANT_CPU) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
    return APEX_OK;
  }
  gpu::Delay a = {nanoseconds};
  void* parameters[] = {&a};
  return apex_launch(place, &delay, {1, 1, 1}, {1, 1, 1}, 0, parameters);
}
