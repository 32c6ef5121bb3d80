// CUDA, through libcuda.so.1.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <deque>
#include <mutex>

#include "driver.h"
#include "driver_cuda_api.h"
#include "status.h"

namespace apex {
namespace {

// Names and values are those of the driver's binary interface, which never change.
enum : int {
  kNotInitialized = 3,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNoBinaryForGpu = 209,
  kNotFound = 500,
  kAttributeWarpSize = 10,
  kAttributeMultiprocessors = 16,
  kAttributeL2Bytes = 38,
  kAttributeMajor = 75,
  kAttributeMinor = 76,
  kAttributeSharedOptin = 97,
  kFunctionSharedBytes = 1,
  kFunctionPtxVersion = 5,
  kFunctionMaxDynamicShared = 8,
  kLaunchProgrammaticSerialization = 6,
  kCaptureRelaxed = 2,
  kStreamNonBlocking = 1,
};

// Errors of kernels that ran before: every call of the process fails with them until it ends.
bool is_sticky(int code) { return code == 700 || (code >= 714 && code <= 719); }

class Cuda final : public Driver {
 public:
  explicit Cuda(const CudaApi& api) : api_(api) {}

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
    // A load may allocate and synchronise, which a capture in its stricter modes forbids (and would be ended
    // by).
    const Relaxed relaxed(api_);
    if (!*module) {
      void* library = nullptr;
      if (const int code = api_.library_load(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0))
        return not_loaded("cuLibraryLoadData", kernel, device, code);
      *module = library;
    }
    void* found = nullptr;
    if (const int code = api_.library_kernel(&found, *module, kernel)) {
      if (code == kNotFound)
        return fail(APEX_ERROR_NO_KERNEL, "the code object registered for cuda:%d has no kernel %s", device, kernel);
      return not_loaded("cuLibraryGetKernel", kernel, device, code);
    }
    // Launches get the kernel, not the function: it runs in whatever context of the device is current (a
    // green context has functions of its own). The function is asked for so that lazy loading happens now,
    // not in a capture.
    void* in_context = nullptr;
    if (const int code = api_.kernel_function(&in_context, found))
      return not_loaded("cuKernelGetFunction", kernel, device, code);
    if (api_.function_load)
      if (const int code = api_.function_load(in_context)) return not_loaded("cuFuncLoad", kernel, device, code);
    if (const int32_t status = allow_shared(device, found)) return status;
    const bool can_await = api_.launch_ex && was_compiled_for(device, found) >= 90;
    std::lock_guard<std::mutex> lock(functions_lock_);
    *function = &functions_.emplace_back(Function{found, can_await});
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
    void* const kernel = static_cast<const Function*>(function)->kernel;
    if (api_.blocks_at_once(&found, kernel, static_cast<int>(threads), dynamic_shared_bytes) == 0) *blocks = found;
    return APEX_OK;
  }

  int32_t is_capturing(int device, void* stream, bool* capturing) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    int status = 0;
    if (const int code = api_.stream_is_capturing(stream, &status)) return refusal("cuStreamIsCapturing", device, code);
    *capturing = status != 0;
    return APEX_OK;
  }

  int32_t allocate(int device, size_t bytes, void** memory) override {
    *memory = nullptr;
    // Memory of another context would end with that.
    const Current current(*this, device, true);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    CudaAddress made = 0;
    const char* call = "cuMemAlloc";
    int code = api_.memory_allocate(&made, bytes);
    if (!code) {
      // On a stream of its own: one of the caller's may be capturing, and the default stream waits for such.
      void* stream = nullptr;
      call = "cuStreamCreate";
      code = api_.stream_create(&stream, kStreamNonBlocking);
      if (!code) code = api_.memory_set(made, 0, bytes, stream), call = "cuMemsetD8Async";
      if (!code) code = api_.stream_synchronize(stream), call = "cuStreamSynchronize";
      if (stream) api_.stream_destroy(stream);
      if (code) api_.memory_free(made);
    }
    if (code) return code == kOutOfMemory ? int32_t{APEX_OK} : refusal(call, device, code);
    *memory = reinterpret_cast<void*>(made);
    return APEX_OK;
  }

  int32_t allocate_for_peers(int device, size_t bytes, void** memory) override {
    return allocate(device, bytes, memory);
  }

  int32_t release(int device, void* memory) override {
    const Current current(*this, device, true);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    const int code = api_.memory_free(reinterpret_cast<CudaAddress>(memory));
    return code ? refusal("cuMemFree", device, code) : int32_t{APEX_OK};
  }

  void* entry(const char* name) override { return dlsym(api_.library, name); }

  [[gnu::cold]] int32_t refusal(const char* call, int device, int code) override {
    return fail(APEX_ERROR_DRIVER, "%s on cuda:%d: %s%s", call, device, describe(code).characters, sticky_note(code));
  }

  int32_t zero(int device, void* stream, void* memory, size_t bytes) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    const int code = api_.memory_set(reinterpret_cast<CudaAddress>(memory), 0, bytes, stream);
    return code ? refusal("cuMemsetD8Async", device, code) : int32_t{APEX_OK};
  }

  int32_t inside(int device, int32_t (*body)(void*), void* argument) override {
    const Current current(*this, device);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    return body(argument);
  }

  int32_t info(int device, apex_device_info* info) override {
    int handle = 0;
    if (const int32_t status = device_handle(device, &handle)) return status;
    int version = 0, multiprocessors = 0, warp = 0, l2 = 0, shared = 0, major = 0, minor = 0;
    int code = api_.driver_version(&version);
    const auto ask = [&](int* value, int attribute) {
      if (!code) code = api_.device_attribute(value, attribute, handle);
    };
    ask(&multiprocessors, kAttributeMultiprocessors);
    ask(&warp, kAttributeWarpSize);
    ask(&l2, kAttributeL2Bytes);
    ask(&shared, kAttributeSharedOptin);
    ask(&major, kAttributeMajor);
    ask(&minor, kAttributeMinor);
    if (code) return refusal("cuDeviceGetAttribute", device, code);
    info->driver_version = version;
    info->multiprocessors = multiprocessors;
    info->warp_size = warp;
    info->l2_bytes = l2;
    info->shared_bytes_per_block = shared;
    snprintf(info->arch, sizeof info->arch, "sm_%d%d", major, minor);
    return APEX_OK;
  }

 private:
  // Makes a context of the device current for a scope. One that is already, of whatever kind, stays, unless it
  // must be the primary one.
  class Current {
   public:
    Current(Cuda& cuda, int device, bool primary = false)
        : cuda_(cuda), status(cuda.enter(device, primary, &pushed_)) {}
    ~Current() {
      void* ours;
      if (pushed_) cuda_.api_.context_pop(&ours);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    Cuda& cuda_;
    bool pushed_ = false;

   public:
    const int32_t status;
  };

  class Relaxed {
   public:
    explicit Relaxed(const CudaApi& api) : api_(api), exchanged_(api.exchange_capture_mode(&mode_) == 0) {}
    ~Relaxed() {
      if (exchanged_) api_.exchange_capture_mode(&mode_);
    }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

   private:
    const CudaApi& api_;
    int mode_ = kCaptureRelaxed;  // after the exchange: the thread's own
    bool exchanged_;
  };

  struct Device {
    std::atomic<void*> primary{nullptr};  // retained at the first push, for ever: torch lives in it
    std::atomic<int> handle{-1};
  };

  int32_t enter(int device, bool primary_alone, bool* pushed) {
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
    *pushed = true;
    return APEX_OK;
  }

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

  const char* arch_of(int device, char (&arch)[16]) {
    int handle = 0, major = 0, minor = 0;
    if (api_.device_get(&handle, device) || api_.device_attribute(&major, kAttributeMajor, handle) ||
        api_.device_attribute(&minor, kAttributeMinor, handle))
      return "unknown architecture";
    snprintf(arch, sizeof arch, "sm_%d%d", major, minor);
    return arch;
  }

  struct Text { char characters[256]; };

  Text describe(int code) const {
    const char* name = nullptr;
    const char* words = nullptr;
    if (api_.error_name(code, &name) || !name) name = "unknown CUDA error";
    if (api_.error_string(code, &words) || !words) words = "no description";
    Text text;
    snprintf(text.characters, sizeof text.characters, "%s (%d), %s", name, code, words);
    return text;
  }

  // Lazy loading: any of the calls on the way may be the one that finds the image unfit.
  [[gnu::cold]] int32_t not_loaded(const char* call, const char* kernel, int device, int code) {
    char arch[16];
    return fail(APEX_ERROR_DRIVER, "the code object of %s does not load on cuda:%d (%s): %s: %s%s%s", kernel, device,
                arch_of(device, arch), call, describe(code).characters,
                code == kNoBinaryForGpu ? "; it was compiled for another architecture" : "", sticky_note(code));
  }

  [[gnu::cold]] int32_t refused(const Launch& launch, int code) {
    char shared_note[96] = "";
    int handle = 0, most = 0;
    if (code == kInvalidValue && !api_.device_get(&handle, launch.device) &&
        !api_.device_attribute(&most, kAttributeSharedOptin, handle) &&
        launch.dynamic_shared_bytes > static_cast<uint32_t>(most))
      snprintf(shared_note, sizeof shared_note, "; a block of this device has at most %d bytes of shared memory", most);
    return fail(APEX_ERROR_DRIVER,
                "launch of %s on cuda:%d, grid (%u, %u, %u), block (%u, %u, %u), %u bytes of dynamic shared "
                "memory: %s%s%s",
                launch.kernel, launch.device, launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x,
                launch.block.y, launch.block.z, launch.dynamic_shared_bytes, describe(code).characters, shared_note,
                sticky_note(code));
  }

  static const char* sticky_note(int code) {
    return is_sticky(code) ? "; a kernel that ran earlier in this process caused it" : "";
  }

  // What `function` points to outside.
  struct Function {
    void* kernel;
    bool can_await;
  };

  const CudaApi api_;
  std::mutex functions_lock_;
  std::deque<Function> functions_;  // where they are, they stay
  Device devices_[max_devices];
};

}  // namespace

Driver* open_cuda(int32_t& status) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    status = fail(APEX_ERROR_NO_DRIVER, "the NVIDIA driver's libcuda.so.1 cannot be opened: %s",
                  why ? why : "no reason given");
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
