// HIP, through the runtime that this process already has. No vendor header.
#include <string>

#include "driver_common.h"
#include "vendor_library.h"

namespace apex {
namespace {

// Values of HIP's binary interface, ROCm 6 and 7.
enum : int { kAttributeSharedBytes = 74, kFineGrained = 1 };

// hipDeviceProp_tR0600, of which only the architecture's name has no attribute.
constexpr size_t arch_offset = 1160, properties_bytes = 4096;  // 1472 today; room for it to grow

struct Api {
  void* library;
  int (*init)(unsigned);
  const char* (*error_name)(int);
  const char* (*error_string)(int);
  int (*last_error)(void);
  int (*driver_version)(int*);
  int (*device_get)(int*);
  int (*device_set)(int);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*device_properties)(void* properties, int device);
  int (*module_load)(void** module, const void* image);
  int (*module_function)(void** function, void* module, const char* name);
  int (*exchange_capture_mode)(int* mode);
  int (*memory_allocate)(void** memory, size_t bytes);
  int (*memory_allocate_flags)(void** memory, size_t bytes, unsigned flags);
  int (*memory_free)(void* memory);
  int (*memory_set)(void* memory, int value, size_t bytes, void* stream);
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*stream_synchronize)(void* stream);
  int (*stream_is_capturing)(void* stream, int* status);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                void* stream, void** parameters, void** extra);
  int (*blocks_at_once)(int* blocks, void* function, int threads, size_t dynamic_shared_bytes);  // null: unknown
};

class Hip final : public CommonDriver<Hip, Api> {
 public:
  using CommonDriver::CommonDriver;

  int32_t launch(const Launch& launch) override {
    const Current current(*this, launch.device);
    if (current.status) return current.status;
    const int code =
        api_.launch(launch.function, launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x, launch.block.y,
                    launch.block.z, launch.dynamic_shared_bytes, launch.stream, launch.parameters, nullptr);
    return code ? refused(launch, code) : int32_t{APEX_OK};
  }

  int32_t load(int device, const void* image, void** module, const char* kernel, void** function) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    if (!*module) {
      void* loaded = nullptr;
      if (const int code = api_.module_load(&loaded, image)) return not_loaded("", kernel, device, code);
      *module = loaded;
    }
    void* found = nullptr;
    if (const int code = api_.module_function(&found, *module, kernel)) {
      if (code == kNotFound) return no_kernel(kernel, device);
      return refusal("hipModuleGetFunction", device, code);
    }
    *function = found;
    return APEX_OK;
  }

  // Other memory may be cached on this device while another one writes to it.
  int32_t allocate_for_peers(int device, size_t bytes, void** memory) override {
    const auto allocate = [&](void** made, size_t size) {
      return api_.memory_allocate_flags(made, size, kFineGrained);
    };
    return allocate_by("hipExtMallocWithFlags", allocate, device, bytes, memory);
  }

 private:
  friend CommonDriver;
  static constexpr VendorNames names = {
      .platform = "hip",
      .memory_allocate = "hipMalloc",
      .memory_free = "hipFree",
      .memory_set = "hipMemsetAsync",
      .stream_create = "hipStreamCreateWithFlags",
      .stream_synchronize = "hipStreamSynchronize",
      .stream_is_capturing = "hipStreamIsCapturing",
      .device_attribute = "hipDeviceGetAttribute",
  };
  static constexpr VendorAttributes attributes = {
      .multiprocessors = 63, .warp_size = 87, .l2_bytes = 19, .shared_bytes = kAttributeSharedBytes};

  // A device has one context.
  int32_t enter(int device, bool, int* before) {
    int current = -1;
    if (const int code = api_.device_get(&current)) return refusal("hipGetDevice", device, code);
    if (current == device) return APEX_OK;
    if (const int code = api_.device_set(device)) return refusal("hipSetDevice", device, code);
    *before = current;
    return APEX_OK;
  }

  void leave(int before) { api_.device_set(before); }
  // HIP remembers a failure for hipGetLastError, where torch's next check would find ours and raise it.
  void forget_failure() { api_.last_error(); }

  int32_t device_handle(int device, int* handle) {
    *handle = device;
    return APEX_OK;
  }
  int32_t find_arch(int device, int handle, char (&arch)[64]) {
    alignas(16) char properties[properties_bytes] = {};
    if (const int code = api_.device_properties(properties, handle))
      return refusal("hipGetDeviceProperties", device, code);
    snprintf(arch, sizeof arch, "%.63s", properties + arch_offset);
    return APEX_OK;
  }
  // The most that a block may have; 0: not known.
  int shared_bytes(int device, int) {
    int most = 0;
    return api_.device_attribute(&most, kAttributeSharedBytes, device) ? 0 : most;
  }

  Text describe(int code) const {
    Text text;
    snprintf(text.characters, sizeof text.characters, "%s (%d), %s", api_.error_name(code), code,
             api_.error_string(code));
    return text;
  }
  static const char* note_on(int) { return ""; }
  static void* kernel_of(void* function) { return function; }
};

}  // namespace

Driver* open_hip(int32_t& status) {
  std::string reason;
  void* library = open_vendor_library("libamdhip64.so", reason);
  if (!library) {
    status = fail(APEX_ERROR_NO_DRIVER, "there is no HIP runtime to use: %s", reason.c_str());
    return nullptr;
  }
  Api api = {};
  api.library = library;
  const auto find = [&](auto& function, const char* name) {
    if (os::find_function(library, name, function)) return true;
    status = fail(APEX_ERROR_DRIVER, "the HIP runtime has no %s: it is older than ROCm 6.0, which is needed", name);
    return false;
  };
  // The legacy default stream's entry points (no _spt).
  const bool whole =
      find(api.init, "hipInit") && find(api.error_name, "hipGetErrorName") &&
      find(api.error_string, "hipGetErrorString") && find(api.last_error, "hipGetLastError") &&
      find(api.driver_version, "hipDriverGetVersion") && find(api.device_get, "hipGetDevice") &&
      find(api.device_set, "hipSetDevice") && find(api.device_attribute, "hipDeviceGetAttribute") &&
      find(api.device_properties, "hipGetDevicePropertiesR0600") && find(api.module_load, "hipModuleLoadData") &&
      find(api.module_function, "hipModuleGetFunction") &&
      find(api.exchange_capture_mode, "hipThreadExchangeStreamCaptureMode") && find(api.memory_allocate, "hipMalloc") &&
      find(api.memory_allocate_flags, "hipExtMallocWithFlags") && find(api.memory_free, "hipFree") &&
      find(api.memory_set, "hipMemsetAsync") && find(api.stream_create, "hipStreamCreateWithFlags") &&
      find(api.stream_destroy, "hipStreamDestroy") && find(api.stream_synchronize, "hipStreamSynchronize") &&
      find(api.stream_is_capturing, "hipStreamIsCapturing") && find(api.launch, "hipModuleLaunchKernel");
  if (!whole) return nullptr;
  os::find_function(library, "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", api.blocks_at_once);
  if (const int code = api.init(0)) {
    api.last_error();
    status = fail(APEX_ERROR_DRIVER, "hipInit: %s (%d)", api.error_name(code), code);
    return nullptr;
  }
  return new Hip(api);
}

}  // namespace apex
