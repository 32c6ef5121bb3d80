// CUDA, through the library of NVIDIA's driver.
#include <atomic>
#include <deque>
#include <mutex>
#include <string>

#include "driver_common.h"
#include "driver_cuda_api.h"

namespace apex {
namespace {

// Names and values are those of the driver's binary interface, which never change.
enum : int {
  kAttributeMajor = 75,
  kAttributeMinor = 76,
  kAttributeSharedOptin = 97,
  kFunctionSharedBytes = 1,
  kFunctionPtxVersion = 5,
  kFunctionMaxDynamicShared = 8,
  kLaunchProgrammaticSerialization = 6,
};

// Errors of kernels that ran before: every call of the process fails with them until it ends.
bool is_sticky(int code) { return code == 700 || (code >= 714 && code <= 719); }

class Cuda final : public CommonDriver<Cuda, CudaApi> {
 public:
  using CommonDriver::CommonDriver;

  int32_t launch(const Launch& launch) override {
    const Current current(*this, launch.device);
    if (current.status) return current.status;
    const Function& function = *static_cast<const Function*>(launch.function);
    const apex_dim &grid = launch.grid, &block = launch.block;
    int code;
    if (launch.awaits && function.can_await) {
      const LaunchAttribute overlap = {kLaunchProgrammaticSerialization, 0, {1}};
      const LaunchConfig config = {{grid.x, grid.y, grid.z},
                                   {block.x, block.y, block.z},
                                   launch.dynamic_shared_bytes,
                                   launch.stream,
                                   &overlap,
                                   1};
      code = api_.launch_ex(&config, function.kernel, launch.parameters, nullptr);
    } else {
      code = api_.launch(function.kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                         launch.dynamic_shared_bytes, launch.stream, launch.parameters, nullptr);
    }
    return code ? refused(launch, code) : int32_t{APEX_OK};
  }

  int32_t load(int device, const void* image, void** module, const char* kernel, void** function) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);  // it may allocate and synchronise
    if (!*module) {
      void* library = nullptr;
      if (const int code = api_.library_load(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0))
        return not_loaded("cuLibraryLoadData: ", kernel, device, code);
      *module = library;
    }
    void* found = nullptr;
    if (const int code = api_.library_kernel(&found, *module, kernel)) {
      if (code == kNotFound) return no_kernel(kernel, device);
      return not_loaded("cuLibraryGetKernel: ", kernel, device, code);
    }
    // Launches get the kernel, not the function: it runs in whatever context of the device is current (a
    // green context has functions of its own). The function is asked for so that lazy loading happens now,
    // not in a capture.
    void* in_context = nullptr;
    if (const int code = api_.kernel_function(&in_context, found))
      return not_loaded("cuKernelGetFunction: ", kernel, device, code);
    if (api_.function_load)
      if (const int code = api_.function_load(in_context)) return not_loaded("cuFuncLoad: ", kernel, device, code);
    if (const int32_t status = allow_shared(device, found)) return status;
    const bool can_await = api_.launch_ex && was_compiled_for(device, found) >= 90;
    std::lock_guard<std::mutex> lock(functions_lock_);
    *function = &functions_.emplace_back(Function{found, can_await});
    return APEX_OK;
  }

 private:
  friend CommonDriver;
  static constexpr VendorNames names = {
      .platform = "cuda",
      .memory_allocate = "cuMemAlloc",
      .memory_free = "cuMemFree",
      .memory_set = "cuMemsetD8Async",
      .stream_create = "cuStreamCreate",
      .stream_synchronize = "cuStreamSynchronize",
      .stream_is_capturing = "cuStreamIsCapturing",
      .device_attribute = "cuDeviceGetAttribute",
  };
  static constexpr VendorAttributes attributes = {
      .multiprocessors = 16, .warp_size = 10, .l2_bytes = 38, .shared_bytes = kAttributeSharedOptin};

  struct Device {
    std::atomic<void*> primary{nullptr};  // retained at the first push, for ever: torch lives in it
    std::atomic<int> handle{-1};
  };

  // A context of the device that is current already, of whatever kind, stays, unless it must be the primary one.
  int32_t enter(int device, bool primary_alone, int* before) {
    void* current = nullptr;
    if (const int code = api_.context_current(&current)) return refusal("cuCtxGetCurrent", device, code);
    Device& known = devices_[device];
    void* primary = known.primary.load(std::memory_order_acquire);
    if (current && current == primary) return APEX_OK;
    int handle = known.handle.load(std::memory_order_relaxed);
    if (handle < 0)
      if (const int32_t status = device_handle(device, &handle)) return status;
    if (current && !primary_alone) {
      int of_current = -1;
      if (const int code = api_.context_device(&of_current)) return refusal("cuCtxGetDevice", device, code);
      if (of_current == handle) return APEX_OK;
    }
    if (!primary)
      if (const int32_t status = retain(device, handle, &primary)) return status;
    if (current == primary) return APEX_OK;
    if (const int code = api_.context_push(primary)) return refusal("cuCtxPushCurrent", device, code);
    *before = 0;  // whatever it was lies below
    return APEX_OK;
  }
  void leave(int) {
    void* ours;
    api_.context_pop(&ours);
  }
  void forget_failure() {}

  int32_t device_handle(int device, int* handle) {
    if (const int code = api_.device_get(handle, device)) return refusal("cuDeviceGet", device, code);
    devices_[device].handle.store(*handle, std::memory_order_relaxed);
    return APEX_OK;
  }

  [[gnu::cold]] int32_t retain(int device, int handle, void** primary) {
    const Relaxed relaxed(api_);  // it makes the context if there is none
    if (const int code = api_.primary_retain(primary, handle)) return refusal("cuDevicePrimaryCtxRetain", device, code);
    void* before = nullptr;
    if (!devices_[device].primary.compare_exchange_strong(before, *primary, std::memory_order_acq_rel))
      api_.primary_release(handle);  // another thread holds it for all of us
    return APEX_OK;
  }

  // Without this attribute a block gets at most 48 KB of dynamic shared memory.
  int32_t allow_shared(int device, void* kernel) {
    int handle = 0, most = 0, fixed = 0;
    if (const int32_t status = device_handle(device, &handle)) return status;
    if (const int code = api_.device_attribute(&most, kAttributeSharedOptin, handle))
      return refusal("cuDeviceGetAttribute", device, code);
    if (const int code = api_.kernel_get_attribute(&fixed, kFunctionSharedBytes, kernel, handle))
      return refusal("cuKernelGetAttribute", device, code);
    if (const int code = api_.kernel_set_attribute(kFunctionMaxDynamicShared, most - fixed, kernel, handle))
      return refusal("cuKernelSetAttribute", device, code);
    return APEX_OK;
  }

  // 10 * major + minor of the virtual architecture: gpu::await_previous_kernel() is an instruction from 9.0 on.
  int was_compiled_for(int device, void* kernel) {
    int handle = 0, version = 0;
    return device_handle(device, &handle) || api_.kernel_get_attribute(&version, kFunctionPtxVersion, kernel, handle)
               ? 0
               : version;
  }

  int32_t find_arch(int device, int handle, char (&arch)[64]) {
    int major = 0, minor = 0, code = api_.device_attribute(&major, kAttributeMajor, handle);
    if (!code) code = api_.device_attribute(&minor, kAttributeMinor, handle);
    if (code) return refusal(names.device_attribute, device, code);
    snprintf(arch, sizeof arch, "sm_%d%d", major, minor);
    return APEX_OK;
  }

  // The most that a block may have; 0: that is not what `code` is about.
  int shared_bytes(int device, int code) {
    int handle = 0, most = 0;
    if (code != kInvalidValue || api_.device_get(&handle, device)) return 0;
    return api_.device_attribute(&most, kAttributeSharedOptin, handle) ? 0 : most;
  }

  Text describe(int code) const {
    const char* name = nullptr;
    const char* words = nullptr;
    if (api_.error_name(code, &name) || !name) name = "unknown CUDA error";
    if (api_.error_string(code, &words) || !words) words = "no description";
    Text text;
    snprintf(text.characters, sizeof text.characters, "%s (%d), %s", name, code, words);
    return text;
  }

  static const char* note_on(int code) {
    return is_sticky(code) ? "; a kernel that ran earlier in this process caused it" : "";
  }

  // What `function` points to outside.
  struct Function {
    void* kernel;
    bool can_await;
  };
  static void* kernel_of(void* function) { return static_cast<const Function*>(function)->kernel; }

  std::mutex functions_lock_;
  std::deque<Function> functions_;  // where they are, they stay
  Device devices_[max_devices];
};

}  // namespace

Driver* open_cuda(int32_t& status) {
  std::string reason;
  void* library = os::open_library(os::cuda_driver, false, reason);
  if (!library) {
    status = fail(APEX_ERROR_NO_DRIVER, "the NVIDIA driver's %s cannot be opened: %s", os::cuda_driver, reason.c_str());
    return nullptr;
  }
  CudaApi api = {};
  if ((status = find_cuda_api(library, api))) return nullptr;
  if (const int code = api.init(0)) {
    const char* name = nullptr;
    if (api.error_name(code, &name) || !name) name = "unknown CUDA error";
    // What cuInit says in a child whose parent had initialised the driver, through torch for example.
    if (code == kNotInitialized && is_forked_child())
      status = fail(APEX_ERROR_FORKED,
                    "CUDA was already in use when this process was forked (cuInit: %s), and no GPU driver works in a "
                    "forked child. Start workers with the 'spawn' or 'forkserver' method of multiprocessing, or use "
                    "CUDA first after the fork.",
                    name);
    else status = fail(APEX_ERROR_DRIVER, "cuInit: %s (%d)", name, code);
    return nullptr;
  }
  return new Cuda(api);
}

}  // namespace apex
