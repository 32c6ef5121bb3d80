#include "nccl_memory.h"

#include <atomic>
#include <string>

#include "os.h"
#include "status.h"
#include "vendor_library.h"

namespace apex {
namespace {

struct Nccl {
  int (*allocate)(void** memory, size_t bytes);
  int (*release)(void* memory);
  const char* (*words)(int code);
};

int32_t open(const Nccl** found) {
  static std::atomic<const Nccl*> opened{nullptr};
  if ((*found = opened.load(std::memory_order_acquire))) return APEX_OK;
  std::string reason, of_rccl;
  void* library = open_vendor_library("libnccl.so", reason);
  if (!library && !(library = open_vendor_library("librccl.so", of_rccl)))
    return fail(APEX_ERROR_NO_DRIVER, "there is no NCCL to use: %s; %s", reason.c_str(), of_rccl.c_str());
  Nccl nccl = {};
  if (!os::find_function(library, "ncclMemAlloc", nccl.allocate) ||
      !os::find_function(library, "ncclMemFree", nccl.release) ||
      !os::find_function(library, "ncclGetErrorString", nccl.words))
    return fail(APEX_ERROR_NO_DRIVER, "torch's NCCL has no ncclMemAlloc: it is older than 2.19, which is needed");
  const Nccl* before = nullptr;
  const Nccl* const made = new Nccl(nccl);
  if (!opened.compare_exchange_strong(before, made)) delete made;
  *found = opened.load(std::memory_order_acquire);
  return APEX_OK;
}

}  // namespace
}  // namespace apex

extern "C" {

int32_t apex_open_nccl(void) {
  const apex::Nccl* nccl;
  return apex::guarded([&] { return apex::open(&nccl); });
}

void* apex_nccl_allocate(size_t bytes, int32_t, void*) {
  void* memory = nullptr;
  apex::guarded([&]() -> int32_t {
    const apex::Nccl* nccl;
    if (const int32_t status = apex::open(&nccl)) return status;
    if (const int code = nccl->allocate(&memory, bytes)) {
      memory = nullptr;
      return apex::fail(APEX_ERROR_DRIVER, "ncclMemAlloc of %zu bytes: %s (%d)", bytes, nccl->words(code), code);
    }
    return APEX_OK;
  });
  return memory;
}

void apex_nccl_free(void* memory, size_t, int32_t, void*) {
  if (!memory) return;
  apex::guarded([&]() -> int32_t {
    const apex::Nccl* nccl;
    if (const int32_t status = apex::open(&nccl)) return status;
    if (const int code = nccl->release(memory))
      return apex::fail(APEX_ERROR_DRIVER, "ncclMemFree: %s (%d)", nccl->words(code), code);
    return APEX_OK;
  });
}
}
