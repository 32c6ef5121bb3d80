// HIP, through the runtime that this process already has. No vendor header.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "driver.h"
#include "status.h"
#include "vendor_library.h"

namespace apex {
namespace {

// Values of HIP's binary interface, ROCm 6 and 7.
enum : int {
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNoBinaryForGpu = 209,
  kNotFound = 500,
  kAttributeL2Bytes = 19,
  kAttributeMultiprocessors = 63,
  kAttributeSharedBytes = 74,
  kAttributeWarpSize = 87,
  kCaptureRelaxed = 2,
  kStreamNonBlocking = 1,
  kFineGrained = 1,
};

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

class Hip final : public Driver {
 public:
  explicit Hip(const Api& api) : api_(api) {}

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
    const Relaxed relaxed(api_);  // a capture forbids what a load does
    if (!*module) {
      void* loaded = nullptr;
      if (const int code = api_.module_load(&loaded, image)) {
        apex_device_info about = {};
        const bool known = info(device, &about) == APEX_OK;
        return failed(APEX_ERROR_DRIVER, code, "the code object of %s does not load on hip:%d (%s): %s (%d), %s%s",
                      kernel, device, known ? about.arch : "unknown architecture", api_.error_name(code), code,
                      api_.error_string(code),
                      code == kNoBinaryForGpu ? "; it was compiled for another architecture" : "");
      }
      *module = loaded;
    }
    void* found = nullptr;
    if (const int code = api_.module_function(&found, *module, kernel)) {
      if (code == kNotFound)
        return failed(APEX_ERROR_NO_KERNEL, code, "the code object registered for hip:%d has no kernel %s", device,
                      kernel);
      return refusal("hipModuleGetFunction", device, code);
    }
    *function = found;
    return APEX_OK;
  }

  int32_t blocks_at_once(int device, void* function, uint32_t threads, uint32_t dynamic_shared_bytes,
                         int32_t* blocks) override {
    *blocks = 0;
    if (!api_.blocks_at_once) return APEX_OK;
    const Current current(*this, device);
    if (current.status) return current.status;
    int found = 0;
    // Only a grid's size depends on it: a driver that refuses does not say, and what is wrong shows at the launch.
    if (api_.blocks_at_once(&found, function, static_cast<int>(threads), dynamic_shared_bytes) == 0) *blocks = found;
    return APEX_OK;
  }

  int32_t is_capturing(int device, void* stream, bool* capturing) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    int status = 0;
    if (const int code = api_.stream_is_capturing(stream, &status))
      return refusal("hipStreamIsCapturing", device, code);
    *capturing = status != 0;
    return APEX_OK;
  }

  int32_t allocate(int device, size_t bytes, void** memory) override { return allocate(device, bytes, false, memory); }

  // Other memory may be cached on this device while another one writes to it.
  int32_t allocate_for_peers(int device, size_t bytes, void** memory) override {
    return allocate(device, bytes, true, memory);
  }

  int32_t release(int device, void* memory) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    const int code = api_.memory_free(memory);
    return code ? refusal("hipFree", device, code) : int32_t{APEX_OK};
  }

  void* entry(const char* name) override { return dlsym(api_.library, name); }

  [[gnu::cold]] int32_t refusal(const char* call, int device, int code) override {
    return failed(APEX_ERROR_DRIVER, code, "%s on hip:%d: %s (%d), %s", call, device, api_.error_name(code), code,
                  api_.error_string(code));
  }

  int32_t allocate(int device, size_t bytes, bool fine_grained, void** memory) {
    *memory = nullptr;
    const Current current(*this, device);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    void* made = nullptr;
    const char* call = fine_grained ? "hipExtMallocWithFlags" : "hipMalloc";
    int code =
        fine_grained ? api_.memory_allocate_flags(&made, bytes, kFineGrained) : api_.memory_allocate(&made, bytes);
    if (!code) {
      // On a stream of its own: one of the caller's may be capturing, and the default stream waits for such.
      void* stream = nullptr;
      call = "hipStreamCreateWithFlags";
      code = api_.stream_create(&stream, kStreamNonBlocking);
      if (!code) code = api_.memory_set(made, 0, bytes, stream), call = "hipMemsetAsync";
      if (!code) code = api_.stream_synchronize(stream), call = "hipStreamSynchronize";
      if (stream) api_.stream_destroy(stream);
      if (code) api_.memory_free(made);
    }
    if (code == kOutOfMemory) return api_.last_error(), int32_t{APEX_OK};
    if (code) return refusal(call, device, code);
    *memory = made;
    return APEX_OK;
  }

  int32_t zero(int device, void* stream, void* memory, size_t bytes) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    const int code = api_.memory_set(memory, 0, bytes, stream);
    return code ? refusal("hipMemsetAsync", device, code) : int32_t{APEX_OK};
  }

  int32_t inside(int device, int32_t (*body)(void*), void* argument) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    return body(argument);
  }

  int32_t info(int device, apex_device_info* info) override {
    int version = 0, multiprocessors = 0, warp = 0, l2 = 0, shared = 0;
    alignas(16) char properties[properties_bytes] = {};
    int code = api_.driver_version(&version);
    const auto ask = [&](int* value, int attribute) {
      if (!code) code = api_.device_attribute(value, attribute, device);
    };
    ask(&multiprocessors, kAttributeMultiprocessors);
    ask(&warp, kAttributeWarpSize);
    ask(&l2, kAttributeL2Bytes);
    ask(&shared, kAttributeSharedBytes);
    if (code) return refusal("hipDeviceGetAttribute", device, code);
    if ((code = api_.device_properties(properties, device))) return refusal("hipGetDeviceProperties", device, code);
    info->driver_version = version;
    info->multiprocessors = multiprocessors;
    info->warp_size = warp;
    info->l2_bytes = l2;
    info->shared_bytes_per_block = shared;
    snprintf(info->arch, sizeof info->arch, "%.63s", properties + arch_offset);
    return APEX_OK;
  }

 private:
  // Makes the device current for a scope.
  class Current {
   public:
    Current(Hip& hip, int device) : hip_(hip), status(hip.enter(device, &before_)) {}
    ~Current() {
      if (before_ >= 0) hip_.api_.device_set(before_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    Hip& hip_;
    int before_ = -1;  // nothing to restore

   public:
    const int32_t status;
  };

  class Relaxed {
   public:
    explicit Relaxed(const Api& api) : api_(api), exchanged_(api.exchange_capture_mode(&mode_) == 0) {}
    ~Relaxed() {
      if (exchanged_) api_.exchange_capture_mode(&mode_);
    }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

   private:
    const Api& api_;
    int mode_ = kCaptureRelaxed;  // after the exchange: the thread's own
    bool exchanged_;
  };

  int32_t enter(int device, int* before) {
    int current = -1;
    if (const int code = api_.device_get(&current)) return refusal("hipGetDevice", device, code);
    if (current == device) return APEX_OK;
    if (const int code = api_.device_set(device)) return refusal("hipSetDevice", device, code);
    *before = current;
    return APEX_OK;
  }

  // HIP remembers a failure for hipGetLastError, where torch's next check would find ours and raise it.
  template <class... Arguments>
  [[gnu::cold]] int32_t failed(apex_status status, int, const char* format, Arguments... arguments) {
    api_.last_error();
    return fail(status, format, arguments...);
  }

  [[gnu::cold]] int32_t refused(const Launch& launch, int code) {
    char shared_note[96] = "";
    int most = 0;
    if (!api_.device_attribute(&most, kAttributeSharedBytes, launch.device) &&
        launch.dynamic_shared_bytes > static_cast<uint32_t>(most))
      snprintf(shared_note, sizeof shared_note, "; a block of this device has at most %d bytes of shared memory", most);
    return failed(APEX_ERROR_DRIVER, code,
                  "launch of %s on hip:%d, grid (%u, %u, %u), block (%u, %u, %u), %u bytes of dynamic shared memory: "
                  "%s (%d), %s%s",
                  launch.kernel, launch.device, launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x,
                  launch.block.y, launch.block.z, launch.dynamic_shared_bytes, api_.error_name(code), code,
                  api_.error_string(code), shared_note);
  }

  const Api api_;
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
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function) return true;
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
  api.blocks_at_once = reinterpret_cast<decltype(api.blocks_at_once)>(
      dlsym(library, "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"));
  if (const int code = api.init(0)) {
    api.last_error();
    status = fail(APEX_ERROR_DRIVER, "hipInit: %s (%d)", api.error_name(code), code);
    return nullptr;
  }
  return new Hip(api);
}

}  // namespace apex
