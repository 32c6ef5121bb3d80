/* What the drivers of both vendors do alike. `Vendor` (driver_cuda.cpp, driver_hip.cpp) has what differs: the names of
 * calls, the numbers of attributes, contexts, loading and launching. `Api` holds the vendor's entry points, which have
 * one name and one form in both where they do one thing. */
#pragma once
#include <cstdio>

#include "driver.h"
#include "os.h"
#include "status.h"

namespace apex {

// Values of both binary interfaces, which never change: HIP took CUDA's.
enum : int {
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoBinaryForGpu = 209,
  kNotFound = 500,
  kCaptureRelaxed = 2,
  kStreamNonBlocking = 1,
};

// How error messages call the vendor's functions, and `platform` a device.
struct VendorNames {
  const char *platform, *memory_allocate, *memory_free, *memory_set, *stream_create, *stream_synchronize,
      *stream_is_capturing, *device_attribute;
};
struct VendorAttributes { int multiprocessors, warp_size, l2_bytes, shared_bytes; };

template <class Vendor, class Api> class CommonDriver : public Driver {
 public:
  explicit CommonDriver(const Api& api) : api_(api) {}

  int32_t blocks_at_once(int device, void* function, uint32_t threads, uint32_t dynamic_shared_bytes,
                         int32_t* blocks) final {
    *blocks = 0;
    if (!api_.blocks_at_once) return APEX_OK;
    const Current current(own(), device);
    if (current.status) return current.status;
    int found = 0;
    // Only a grid's size depends on it: a driver that refuses does not say, and what is wrong shows at the launch.
    void* const kernel = Vendor::kernel_of(function);
    if (api_.blocks_at_once(&found, kernel, static_cast<int>(threads), dynamic_shared_bytes) == 0) *blocks = found;
    return APEX_OK;
  }

  int32_t is_capturing(int device, void* stream, bool* capturing) final {
    const Current current(own(), device);
    if (current.status) return current.status;
    int status = 0;
    if (const int code = api_.stream_is_capturing(stream, &status))
      return refusal(Vendor::names.stream_is_capturing, device, code);
    *capturing = status != 0;
    return APEX_OK;
  }

  int32_t allocate(int device, size_t bytes, void** memory) final {
    return allocate_by(Vendor::names.memory_allocate, api_.memory_allocate, device, bytes, memory);
  }
  int32_t allocate_for_peers(int device, size_t bytes, void** memory) override {
    return allocate(device, bytes, memory);
  }

  int32_t release(int device, void* memory) final {
    const Current current(own(), device, true);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    const int code = api_.memory_free(memory);
    return code ? refusal(Vendor::names.memory_free, device, code) : int32_t{APEX_OK};
  }

  int32_t zero(int device, void* stream, void* memory, size_t bytes) final {
    const Current current(own(), device);
    if (current.status) return current.status;
    const int code = api_.memory_set(memory, 0, bytes, stream);
    return code ? refusal(Vendor::names.memory_set, device, code) : int32_t{APEX_OK};
  }

  int32_t inside(int device, int32_t (*body)(void*), void* argument) final {
    const Current current(own(), device);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    return body(argument);
  }

  int32_t info(int device, apex_device_info* info) final {
    int handle = 0;
    if (const int32_t status = own().device_handle(device, &handle)) return status;
    constexpr VendorAttributes attributes = Vendor::attributes;
    int version = 0, multiprocessors = 0, warp = 0, l2 = 0, shared = 0;
    int code = api_.driver_version(&version);
    const auto ask = [&](int* value, int attribute) {
      if (!code) code = api_.device_attribute(value, attribute, handle);
    };
    ask(&multiprocessors, attributes.multiprocessors);
    ask(&warp, attributes.warp_size);
    ask(&l2, attributes.l2_bytes);
    ask(&shared, attributes.shared_bytes);
    if (code) return refusal(Vendor::names.device_attribute, device, code);
    if (const int32_t status = own().find_arch(device, handle, info->arch)) return status;
    info->driver_version = version;
    info->multiprocessors = multiprocessors;
    info->warp_size = warp;
    info->l2_bytes = l2;
    info->shared_bytes_per_block = shared;
    return APEX_OK;
  }

  void* entry(const char* name) final { return os::find_symbol(api_.library, name); }

  [[gnu::cold]] int32_t refusal(const char* call, int device, int code) final {
    own().forget_failure();
    return fail(APEX_ERROR_DRIVER, "%s on %s:%d: %s%s", call, Vendor::names.platform, device,
                own().describe(code).characters, Vendor::note_on(code));
  }

 protected:
  struct Text { char characters[256]; };

  // Makes the device, or a context of it, current for a scope. `primary`: of its contexts the one that all share.
  class Current {
   public:
    Current(Vendor& vendor, int device, bool primary = false)
        : vendor_(vendor), status(vendor.enter(device, primary, &before_)) {}
    ~Current() {
      if (before_ >= 0) vendor_.leave(before_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    Vendor& vendor_;
    int before_ = -1;  // nothing to restore

   public:
    const int32_t status;
  };

  // What a capture in its stricter modes forbids (and would be ended by), a load or an allocation, is allowed.
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

  // `call` is what allocate(&memory, bytes) is named in an error message.
  template <class Allocate>
  int32_t allocate_by(const char* call, const Allocate& allocate, int device, size_t bytes, void** memory) {
    *memory = nullptr;
    // Memory of another context would end with that.
    const Current current(own(), device, true);
    if (current.status) return current.status;
    const Relaxed relaxed(api_);
    void* made = nullptr;
    int code = allocate(&made, bytes);
    if (!code) {
      // On a stream of its own: one of the caller's may be capturing, and the default stream waits for such.
      void* stream = nullptr;
      call = Vendor::names.stream_create;
      code = api_.stream_create(&stream, kStreamNonBlocking);
      if (!code) code = api_.memory_set(made, 0, bytes, stream), call = Vendor::names.memory_set;
      if (!code) code = api_.stream_synchronize(stream), call = Vendor::names.stream_synchronize;
      if (stream) api_.stream_destroy(stream);
      if (code) api_.memory_free(made);
    }
    if (code == kOutOfMemory) return own().forget_failure(), int32_t{APEX_OK};
    if (code) return refusal(call, device, code);
    *memory = made;
    return APEX_OK;
  }

  // `call`: the function that found the image unfit, where several may, and ": ".
  [[gnu::cold]] int32_t not_loaded(const char* call, const char* kernel, int device, int code) {
    apex_device_info about = {};
    const bool known = info(device, &about) == APEX_OK;
    own().forget_failure();
    return fail(APEX_ERROR_DRIVER, "the code object of %s does not load on %s:%d (%s): %s%s%s%s", kernel,
                Vendor::names.platform, device, known ? about.arch : "unknown architecture", call,
                own().describe(code).characters,
                code == kNoBinaryForGpu ? "; it was compiled for another architecture" : "", Vendor::note_on(code));
  }
  [[gnu::cold]] int32_t no_kernel(const char* kernel, int device) {
    own().forget_failure();
    return fail(APEX_ERROR_NO_KERNEL, "the code object registered for %s:%d has no kernel %s", Vendor::names.platform,
                device, kernel);
  }

  [[gnu::cold]] int32_t refused(const Launch& launch, int code) {
    char shared_note[96] = "";
    const int most = own().shared_bytes(launch.device, code);
    if (most > 0 && launch.dynamic_shared_bytes > static_cast<uint32_t>(most))
      snprintf(shared_note, sizeof shared_note, "; a block of this device has at most %d bytes of shared memory", most);
    own().forget_failure();
    return fail(APEX_ERROR_DRIVER,
                "launch of %s on %s:%d, grid (%u, %u, %u), block (%u, %u, %u), %u bytes of dynamic shared memory: "
                "%s%s%s",
                launch.kernel, Vendor::names.platform, launch.device, launch.grid.x, launch.grid.y, launch.grid.z,
                launch.block.x, launch.block.y, launch.block.z, launch.dynamic_shared_bytes,
                own().describe(code).characters, shared_note, Vendor::note_on(code));
  }

  const Api api_;

 private:
  Vendor& own() { return static_cast<Vendor&>(*this); }
};

}  // namespace apex
