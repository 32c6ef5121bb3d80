// apex_launch: from a launch site's handle to the driver's call.
#include "driver.h"
#include "executor.h"
#include "status.h"
#include "table.h"

namespace apex {
namespace {

bool is_gpu_place(const apex_place& place) {
  return place.platform != APEX_CPU && is_place(place.platform, place.device);
}

int32_t no_such_place(const char* what, int32_t platform, int32_t device) {
  return fail(APEX_ERROR_ARGUMENT, "%s: no GPU place: platform %d (%s), device %d", what, platform,
              platform_name(platform), device);
}

// The first launch of a kernel on a device, or the first after another code object was registered.
[[gnu::cold]] int32_t load(const apex_place& place, Kernel* kernel, Driver& driver, void** function) {
  const Unit* unit = kernel->unit;
  CodeObject* object = current_object(unit, place.platform, place.device);
  if (!object) {
    const int32_t variant = apex_resolve(place.platform, place.device, unit->name);
    object = current_object(unit, place.platform, place.device);
    if (variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;
    if (variant != APEX_VARIANT_KERNEL)
      return fail(APEX_USE_REFERENCE, "no kernel of %s is offered on %s:%d", unit->name, platform_name(place.platform),
                  place.device);
    if (!object)
      return fail(APEX_ERROR_NO_KERNEL, "a kernel of %s is offered on %s:%d, but no code object was registered",
                  unit->name, platform_name(place.platform), place.device);
  }
  {
    std::lock_guard<std::mutex> lock(object->loading);
    *function = kernel->function[place.platform][place.device].load(std::memory_order_acquire);
    if (*function) return APEX_OK;  // another thread was quicker
    if (const int32_t status = driver.load(place.device, object->image, &object->module, kernel->name, function))
      return status;
    publish(kernel, place.platform, place.device, object, *function);
  }
  return APEX_OK;
}

// The driver, and the kernel as it launches it.
struct Loaded {
  Driver* driver;
  Kernel* kernel;
  void* function;
};
int32_t find(const apex_place& place, apex_kernel* handle, Loaded* loaded) {
  if (!is_gpu_place(place)) return no_such_place(handle->name, place.platform, place.device);
  int32_t status;
  loaded->driver = open_driver(place.platform, status);
  if (!loaded->driver) return status;
  loaded->kernel = find_kernel(handle);
  if (!loaded->kernel) return fail(APEX_ERROR_MEMORY, "the table of kernels is full");
  loaded->function = loaded->kernel->function[place.platform][place.device].load(std::memory_order_acquire);
  return loaded->function ? int32_t{APEX_OK} : load(place, loaded->kernel, *loaded->driver, &loaded->function);
}

int32_t launch(const apex_place& place, apex_kernel* handle, apex_dim grid, apex_dim block, uint32_t shared,
               void** parameters) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return APEX_OK;
  if (place.platform == APEX_CPU) return execute(handle->name, grid, block, shared, parameters);
  Loaded loaded;
  if (const int32_t status = find(place, handle, &loaded)) return status;
  return loaded.driver->launch({loaded.kernel->name, place.device, place.stream, loaded.function, grid, block, shared,
                                parameters, handle->awaits != 0});
}

}  // namespace

int32_t blocks_at_once(const apex_place& place, apex_kernel* handle, uint32_t threads, uint32_t shared,
                       int32_t* blocks) {
  *blocks = 0;
  if (place.platform == APEX_CPU) return APEX_OK;
  return guarded([&] {
    Loaded loaded;
    if (const int32_t status = find(place, handle, &loaded)) return status;
    return loaded.driver->blocks_at_once(place.device, loaded.function, threads, shared, blocks);
  });
}

}  // namespace apex

extern "C" {

int32_t apex_launch(const apex_place* place, apex_kernel* kernel, apex_dim grid, apex_dim block,
                    uint32_t dynamic_shared_bytes, void** parameters) {
  if (!place || !kernel || !kernel->unit || !kernel->name)
    return apex::fail(APEX_ERROR_ARGUMENT, "apex_launch: place, kernel, its unit and its name must not be null");
  return apex::guarded([&] { return apex::launch(*place, kernel, grid, block, dynamic_shared_bytes, parameters); });
}

int32_t apex_get_device_info(int32_t platform, int32_t device, apex_device_info* info) {
  if (!info) return apex::fail(APEX_ERROR_ARGUMENT, "apex_get_device_info: info must not be null");
  *info = {};
  if (!apex::is_gpu_place({platform, device, nullptr}))
    return apex::no_such_place("apex_get_device_info", platform, device);
  return apex::guarded([&] {
    int32_t status;
    apex::Driver* driver = apex::open_driver(platform, status);
    return driver ? driver->info(device, info) : status;
  });
}

int32_t apex_is_capturing(const apex_place* place) {
  if (!place) return -apex::fail(APEX_ERROR_ARGUMENT, "apex_is_capturing: place must not be null");
  if (place->platform == APEX_CPU) return 0;
  if (!apex::is_gpu_place(*place)) return -apex::no_such_place("apex_is_capturing", place->platform, place->device);
  bool capturing = false;
  const int32_t status = apex::guarded([&] {
    int32_t opened;
    apex::Driver* driver = apex::open_driver(place->platform, opened);
    return driver ? driver->is_capturing(place->device, place->stream, &capturing) : opened;
  });
  return status ? -status : capturing;
}
}
