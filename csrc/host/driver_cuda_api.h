/* The entry points of libcuda.so.1 that launching needs. No vendor header: the few types are opaque pointers and
 * ints. */
#pragma once
#include <cstddef>
#include <cstdint>

namespace apex {

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id, padding;
  int value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct CudaApi {
  void* library;
  int (*init)(unsigned);
  int (*error_name)(int, const char**);
  int (*error_string)(int, const char**);
  int (*driver_version)(int*);
  int (*device_get)(int* device, int ordinal);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*primary_retain)(void** context, int device);
  int (*primary_release)(int device);
  int (*context_current)(void** context);
  int (*context_device)(int* device);
  int (*context_push)(void* context);
  int (*context_pop)(void** context);
  int (*library_load)(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned);
  int (*library_kernel)(void** kernel, void* library, const char* name);
  int (*kernel_function)(void** function, void* kernel);
  int (*kernel_get_attribute)(int* value, int attribute, void* kernel, int device);
  int (*kernel_set_attribute)(int attribute, int value, void* kernel, int device);
  int (*function_load)(void* function);  // from 12.4; null before
  int (*exchange_capture_mode)(int* mode);
  // A CUdeviceptr is an integer as wide as a pointer, and is passed as one.
  int (*memory_allocate)(void** memory, size_t bytes);
  int (*memory_free)(void* memory);
  int (*memory_set)(void* memory, unsigned char value, size_t bytes, void* stream);
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*stream_synchronize)(void* stream);
  int (*stream_is_capturing)(void* stream, int* status);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                void* stream, void** parameters, void** extra);
  int (*launch_ex)(const LaunchConfig* config, void* function, void** parameters, void** extra);  // null: unknown
  int (*blocks_at_once)(int* blocks, void* function, int threads, size_t dynamic_shared_bytes);   // null: unknown
};

/* Finds them in the open library. Else the status, with a text that names the one that is not there. */
int32_t find_cuda_api(void* library, CudaApi& api);

}  // namespace apex
