#include "peer_memory.h"

#include "driver.h"
#include "status.h"
#include "table.h"

namespace apex {
namespace {

constexpr size_t granularity = size_t{2} << 20;
constexpr unsigned lazy_peer_access = 1;

// By value, as the drivers take it.
struct Handle { char bytes[APEX_PEER_HANDLE_BYTES]; };

struct Names { const char *get, *open, *close; };
constexpr Names cuda_names = {"cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"};
constexpr Names hip_names = {"hipIpcGetMemHandle", "hipIpcOpenMemHandle", "hipIpcCloseMemHandle"};

int32_t find_driver(const char* what, const apex_place* place, Driver** driver) {
  if (!place || place->platform == APEX_CPU || !is_place(place->platform, place->device))
    return fail(APEX_ERROR_ARGUMENT, "%s: there is no such GPU", what);
  int32_t status = APEX_OK;
  *driver = open_driver(place->platform, status);
  return *driver ? int32_t{APEX_OK} : status;
}

struct Call {
  void* function;
  Handle* handle;
  void* memory;
  int code;
};

// One function of the driver, with the device's context current.
int32_t call(const char* what, const apex_place* place, const char* Names::* which, int32_t (*body)(void*),
             Call& arguments) {
  Driver* driver;
  if (const int32_t status = find_driver(what, place, &driver)) return status;
  const char* const name = (place->platform == APEX_HIP ? hip_names : cuda_names).*which;
  arguments.function = driver->entry(name);
  if (!arguments.function) return fail(APEX_ERROR_DRIVER, "the driver has no %s, so memory cannot be shared", name);
  if (const int32_t status = driver->inside(place->device, body, &arguments)) return status;
  return arguments.code ? driver->refusal(name, place->device, arguments.code) : int32_t{APEX_OK};
}

template <class... Types>
int32_t answer(void* call, Types... values) {
  auto* const c = static_cast<Call*>(call);
  c->code = reinterpret_cast<int (*)(Types...)>(c->function)(values...);
  return APEX_OK;
}

}  // namespace
}  // namespace apex

extern "C" {

int32_t apex_peer_allocate(const apex_place* place, size_t bytes, void** memory) {
  using namespace apex;
  *memory = nullptr;
  Driver* driver;
  if (const int32_t status = find_driver("apex_peer_allocate", place, &driver)) return status;
  const size_t whole = (bytes + granularity - 1) / granularity * granularity;
  return driver->allocate_for_peers(place->device, whole ? whole : granularity, memory);
}

int32_t apex_peer_free(const apex_place* place, void* memory) {
  using namespace apex;
  Driver* driver;
  if (const int32_t status = find_driver("apex_peer_free", place, &driver)) return status;
  return driver->release(place->device, memory);
}

int32_t apex_peer_handle(const apex_place* place, const void* memory, void* handle) {
  using namespace apex;
  Call arguments = {nullptr, static_cast<Handle*>(handle), const_cast<void*>(memory), 0};
  return call(
      "apex_peer_handle", place, &Names::get,
      [](void* c) { return answer(c, static_cast<Call*>(c)->handle, static_cast<Call*>(c)->memory); }, arguments);
}

int32_t apex_peer_open(const apex_place* place, const void* handle, void** memory) {
  using namespace apex;
  *memory = nullptr;
  Call arguments = {nullptr, static_cast<Handle*>(const_cast<void*>(handle)), nullptr, 0};
  const int32_t status = call(
      "apex_peer_open", place, &Names::open,
      [](void* c) {
        auto* const given = static_cast<Call*>(c);
        return answer(c, &given->memory, *given->handle, lazy_peer_access);
      },
      arguments);
  if (!status) *memory = arguments.memory;
  return status;
}

int32_t apex_peer_close(const apex_place* place, void* memory) {
  using namespace apex;
  Call arguments = {nullptr, nullptr, memory, 0};
  return call(
      "apex_peer_close", place, &Names::close, [](void* c) { return answer(c, static_cast<Call*>(c)->memory); },
      arguments);
}

int32_t apex_peer_zero(const apex_place* place, void* memory, size_t bytes) {
  using namespace apex;
  Driver* driver;
  if (const int32_t status = find_driver("apex_peer_zero", place, &driver)) return status;
  return driver->zero(place->device, place->stream, memory, bytes);
}
}
