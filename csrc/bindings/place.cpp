#include "place.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11
#include <dlfcn.h>
#endif

namespace apex {
namespace {
bool uses_hip = false;

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11
// c10::Stream has no native handle before torch 2.11; the accelerator's own library does. It was loaded
// RTLD_LOCAL, so it is asked by name, and never loaded by us.
void* native_stream(c10::Device device) {
  using CurrentStream = int (*)(int32_t device, void** stream);
  static const CurrentStream current_stream = [] {
    for (const char* name : {"libtorch_cuda.so", "libtorch_hip.so"})
      if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD))
        if (void* f = dlsym(library, "aoti_torch_get_current_cuda_stream")) return reinterpret_cast<CurrentStream>(f);
    return CurrentStream(nullptr);
  }();
  void* stream = nullptr;
  TORCH_CHECK(current_stream && current_stream(device.index(), &stream) == 0, "apex: torch's current stream of ",
              device, " cannot be read");
  return stream;
}
#else
void* native_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}
#endif
}  // namespace

extern "C" void apex_torch_use_hip(int hip) { uses_hip = hip != 0; }

apex_place place_of(c10::Device device) {
  if (device.is_cpu()) return {APEX_CPU, 0, nullptr};
  if (!device.is_cuda()) return {-1, device.index(), nullptr};
  return {uses_hip ? APEX_HIP : APEX_CUDA, device.index(), native_stream(device)};
}
}  // namespace apex
