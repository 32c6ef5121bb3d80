#include "driver_cuda_api.h"

#include "os.h"
#include "status.h"

namespace apex {

int32_t find_cuda_api(void* library, CudaApi& api) {
  api.library = library;
  const auto look_up = [&](auto& function, const char* name) { return os::find_function(library, name, function); };
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    missing = name;
    return look_up(function, name);
  };
  // The legacy default stream's entry points, and of a versioned function the version whose type is above.
  const bool whole =
      find(api.init, "cuInit") && find(api.error_name, "cuGetErrorName") &&
      find(api.error_string, "cuGetErrorString") && find(api.driver_version, "cuDriverGetVersion") &&
      find(api.device_get, "cuDeviceGet") && find(api.device_attribute, "cuDeviceGetAttribute") &&
      find(api.primary_retain, "cuDevicePrimaryCtxRetain") &&
      find(api.primary_release, "cuDevicePrimaryCtxRelease_v2") && find(api.context_current, "cuCtxGetCurrent") &&
      find(api.context_device, "cuCtxGetDevice") && find(api.context_push, "cuCtxPushCurrent_v2") &&
      find(api.context_pop, "cuCtxPopCurrent_v2") && find(api.library_load, "cuLibraryLoadData") &&
      find(api.library_kernel, "cuLibraryGetKernel") && find(api.kernel_function, "cuKernelGetFunction") &&
      find(api.kernel_get_attribute, "cuKernelGetAttribute") &&
      find(api.kernel_set_attribute, "cuKernelSetAttribute") &&
      find(api.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode") &&
      find(api.memory_allocate, "cuMemAlloc_v2") && find(api.memory_free, "cuMemFree_v2") &&
      find(api.memory_set, "cuMemsetD8Async") && find(api.stream_create, "cuStreamCreate") &&
      find(api.stream_destroy, "cuStreamDestroy_v2") && find(api.stream_synchronize, "cuStreamSynchronize") &&
      find(api.stream_is_capturing, "cuStreamIsCapturing") && find(api.launch, "cuLaunchKernel");
  if (!whole)
    return fail(APEX_ERROR_DRIVER,
                "the NVIDIA driver has no %s: it is older than CUDA 12.0 (release 525), which is needed", missing);
  look_up(api.launch_ex, "cuLaunchKernelEx");
  look_up(api.function_load, "cuFuncLoad");
  look_up(api.blocks_at_once, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  return APEX_OK;
}

}  // namespace apex
