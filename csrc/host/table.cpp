#include "table.h"

#include <cstdlib>
#include <cstring>
#include <memory>

#include "executor.h"
#include "status.h"

namespace apex {
namespace {

constexpr uint32_t unit_slots = 2048;  // a power of two
constexpr uint32_t kernel_slots = 8192;

// The mutex guards writing, and what Unit says it guards. It is held for memory work only: never while the
// resolver (which may want the GIL) or the driver is called.
std::mutex table_mutex;
std::atomic<Unit*> units[unit_slots];  // open addressing by the hash of the name
uint32_t unit_count = 0;
std::atomic<Kernel*> kernels[kernel_slots];  // [0] stays empty: slot 0 means none
uint32_t kernel_count = 0;

std::atomic<apex_resolver> resolver{nullptr};
std::atomic<uint64_t> generation{0};  // counts forgettings: an answer to an older question is not kept

using Lock = std::lock_guard<std::mutex>;

uint32_t hash(const char* text) {  // FNV-1a
  uint32_t value = 2166136261u;
  for (; *text; ++text) value = (value ^ static_cast<unsigned char>(*text)) * 16777619u;
  return value;
}

char* copy_text(const char* text) {
  char* copy = strdup(text);
  if (!copy) throw std::bad_alloc();
  return copy;
}

// The unit, or null with `at` the place where it belongs.
Unit* look_up(const char* name, uint32_t& at) {
  for (at = hash(name) & (unit_slots - 1);; at = (at + 1) & (unit_slots - 1)) {
    Unit* unit = units[at].load(std::memory_order_acquire);
    if (!unit || strcmp(unit->name, name) == 0) return unit;
  }
}

CodeObject* last_object(const Unit* unit, int32_t platform, int32_t device) {
  for (auto it = unit->objects.rbegin(); it != unit->objects.rend(); ++it)
    if (it->platform == platform && it->device == device) return it->object;
  return nullptr;
}

void forget() {
  Lock lock(table_mutex);
  generation.fetch_add(1, std::memory_order_relaxed);
  for (auto& entry : units)
    if (Unit* unit = entry.load(std::memory_order_relaxed))
      for (auto& of_platform : unit->choice)
        for (auto& choice : of_platform) choice.store(APEX_VARIANT_UNKNOWN, std::memory_order_relaxed);
}

int32_t register_object(int32_t platform, int32_t device, const char* name, const void* image, size_t bytes) {
  if (platform == APEX_CPU || !is_place(platform, device))
    return fail(APEX_ERROR_ARGUMENT, "apex_register_code_object: no GPU place: platform %d, device %d", platform,
                device);
  if (!name || !*name || !image || !bytes)
    return fail(APEX_ERROR_ARGUMENT, "apex_register_code_object: unit and image must not be empty");
  Unit* unit = find_unit(name);
  if (!unit) return fail(APEX_ERROR_MEMORY, "more than %u units", unit_slots / 2);

  auto fresh = std::make_unique<CodeObject>();
  fresh->bytes = bytes;
  std::unique_ptr<char, decltype(&free)> copy(static_cast<char*>(malloc(bytes + 1)), &free);
  if (!copy) throw std::bad_alloc();
  memcpy(copy.get(), image, bytes);
  copy.get()[bytes] = '\0';

  Lock lock(table_mutex);
  unit->objects.reserve(unit->objects.size() + 1);
  Unit::Placed placed{platform, device, nullptr};
  for (size_t i = 0; i < unit->objects.size(); ++i) {
    const Unit::Placed& old = unit->objects[i];
    if (old.platform != platform || old.device != device) continue;
    if (old.object->bytes != bytes || memcmp(old.object->image, image, bytes) != 0) continue;
    if (old.object == last_object(unit, platform, device)) return APEX_OK;  // in force already
    placed = old;
    unit->objects.erase(unit->objects.begin() + static_cast<ptrdiff_t>(i));
    break;
  }
  if (!placed.object) {
    fresh->image = copy.release();
    placed.object = fresh.release();
  }
  unit->objects.push_back(placed);
  for (Kernel* kernel : unit->kernels) kernel->function[platform][device].store(nullptr, std::memory_order_release);
  return APEX_OK;
}

}  // namespace

bool is_place(int32_t platform, int32_t device) {
  return platform >= 0 && platform < platforms && device >= 0 && device < max_devices;
}

Unit* find_unit(const char* name) {
  uint32_t at;
  if (Unit* unit = look_up(name, at)) return unit;
  auto fresh = std::make_unique<Unit>();
  Lock lock(table_mutex);
  if (Unit* unit = look_up(name, at)) return unit;   // another thread was quicker
  if (unit_count == unit_slots / 2) return nullptr;  // half full, so that every search ends soon
  fresh->name = copy_text(name);
  ++unit_count;
  units[at].store(fresh.get(), std::memory_order_release);
  return fresh.release();
}

Kernel* find_kernel(apex_kernel* handle) {
  if (const uint32_t slot = __atomic_load_n(&handle->slot, __ATOMIC_ACQUIRE); slot && slot < kernel_slots)
    return kernels[slot].load(std::memory_order_acquire);
  Unit* unit = find_unit(handle->unit);
  if (!unit) return nullptr;
  auto fresh = std::make_unique<Kernel>();
  Lock lock(table_mutex);
  Kernel* kernel = nullptr;
  for (Kernel* known : unit->kernels)
    if (strcmp(known->name, handle->name) == 0) kernel = known;
  if (!kernel) {
    if (kernel_count + 1 == kernel_slots) return nullptr;
    unit->kernels.reserve(unit->kernels.size() + 1);
    fresh->unit = unit;
    fresh->name = copy_text(handle->name);
    fresh->slot = ++kernel_count;
    kernel = fresh.release();
    unit->kernels.push_back(kernel);
    kernels[kernel->slot].store(kernel, std::memory_order_release);
  }
  __atomic_store_n(&handle->slot, kernel->slot, __ATOMIC_RELEASE);
  return kernel;
}

CodeObject* current_object(const Unit* unit, int32_t platform, int32_t device) {
  Lock lock(table_mutex);
  return last_object(unit, platform, device);
}

void publish(Kernel* kernel, int32_t platform, int32_t device, const CodeObject* object, void* function) {
  Lock lock(table_mutex);
  if (last_object(kernel->unit, platform, device) == object)
    kernel->function[platform][device].store(function, std::memory_order_release);
}

void lock_table() { table_mutex.lock(); }
void unlock_table() { table_mutex.unlock(); }

}  // namespace apex

extern "C" {

void apex_set_resolver(apex_resolver callback) {
  apex::resolver.store(callback, std::memory_order_release);
  apex::forget();
}

void apex_forget_choices(void) { apex::forget(); }

int32_t apex_resolve(int32_t platform, int32_t device, const char* name) {
  using namespace apex;
  const auto unknown = [&](const char* why) {
    fail(APEX_ERROR_ARGUMENT, "no variant of %s on %s:%d: %s", name ? name : "(null)", platform_name(platform), device,
         why);
    return int32_t{APEX_VARIANT_UNKNOWN};
  };
  if (!name || !*name) return unknown("a unit has a name");
  if (platform == APEX_CPU && has_executor()) return APEX_VARIANT_KERNEL;
  if (platform == APEX_CPU && device < 0) device = 0;  // torch's CPU device has index -1
  if (!is_place(platform, device)) return unknown("there is no such place");

  Unit* unit = nullptr;
  const int32_t status = guarded([&] {
    unit = find_unit(name);
    return int32_t{APEX_OK};
  });
  if (status) return APEX_VARIANT_UNKNOWN;
  if (!unit) return unknown("the table of units is full");
  auto& choice = unit->choice[platform][device];
  if (const int32_t known = choice.load(std::memory_order_acquire)) return known;

  const uint64_t asked = generation.load(std::memory_order_acquire);
  const apex_resolver callback = resolver.load(std::memory_order_acquire);
  if (!callback) {
    if (current_object(unit, platform, device)) return APEX_VARIANT_KERNEL;
    return platform == APEX_CPU ? APEX_VARIANT_CPU : APEX_VARIANT_REFERENCE;
  }
  apex_set_last_error("");
  const int32_t answer = callback(platform, device, name);
  if (answer < APEX_VARIANT_KERNEL || answer > APEX_VARIANT_REFERENCE) {
    if (*apex_last_error()) return APEX_VARIANT_UNKNOWN;  // the resolver's own words
    return unknown("the resolver gave no answer (it raised, or its table has no such unit)");
  }
  Lock lock(table_mutex);
  if (generation.load(std::memory_order_relaxed) == asked) choice.store(answer, std::memory_order_release);
  return answer;
}

int32_t apex_register_code_object(int32_t platform, int32_t device, const char* unit, const void* image, size_t bytes) {
  return apex::guarded([&] { return apex::register_object(platform, device, unit, image, bytes); });
}
}
