/* The vendor's driver, as far as launching needs it. One object per platform, made at first need, never
 * freed. */
#pragma once
#include <cstddef>
#include <cstdint>

#include "apex.h"

namespace apex {

constexpr int max_devices = 128;  // torch's own limit: its device index has eight bits, signed

struct Launch {
  const char* kernel;  // for texts
  int device;
  void* stream;
  void* function;
  apex_dim grid, block;
  uint32_t dynamic_shared_bytes;
  void** parameters;
  bool awaits;  // apex_kernel's: where the code can, it begins while the kernel before it ends
};

/* Every member works on `device` whatever is current, leaves device and context as they were, and reports
 * through fail(). Any thread may call. */
class Driver {
 public:
  virtual int32_t launch(const Launch& launch) = 0;

  /* Loads `image` unless *module is set, then finds `kernel` in it. The caller lets one thread at a time work
   * on a module. Allowed while this or another thread captures a graph. */
  virtual int32_t load(int device, const void* image, void** module, const char* kernel, void** function) = 0;

  /* How many blocks of the function fit on a multiprocessor at once; 0: the driver does not say. */
  virtual int32_t blocks_at_once(int device, void* function, uint32_t threads, uint32_t dynamic_shared_bytes,
                                 int32_t* blocks) = 0;

  virtual int32_t is_capturing(int device, void* stream, bool* capturing) = 0;

  /* Zeroed memory of the device, of its primary context. Null: the device has none left. Allowed while this or
   * another thread captures a graph; no graph gets a node of it. */
  virtual int32_t allocate(int device, size_t bytes, void** memory) = 0;

  /* The same for memory that other devices write to while kernels of this one read it. */
  virtual int32_t allocate_for_peers(int device, size_t bytes, void** memory) = 0;
  virtual int32_t release(int device, void* memory) = 0;

  /* Zeroes memory, in its turn on the stream. */
  virtual int32_t zero(int device, void* stream, void* memory, size_t bytes) = 0;

  /* What `body` of `argument` answers, with the device's context current as at a launch. Allowed during a capture. */
  virtual int32_t inside(int device, int32_t (*body)(void*), void* argument) = 0;
  virtual int32_t info(int device, apex_device_info* info) = 0;

  /* A function of the vendor's library, for what is rarely called; null: it has none of that name. */
  virtual void* entry(const char* name) = 0;

  /* fail() with what the driver says of a `call` that answered `code`. */
  virtual int32_t refusal(const char* call, int device, int code) = 0;

 protected:
  ~Driver() = default;
};

/* The open driver of a GPU platform. Opens it at the first call; null after a failure, which `status` then
 * holds: APEX_ERROR_NO_DRIVER (the next call tries again), APEX_ERROR_FORKED, APEX_ERROR_DRIVER. */
Driver* open_driver(int32_t platform, int32_t& status);

/* The driver if it is open in this process, else null. */
Driver* opened_driver(int32_t platform);

/* Makers, for open_driver alone. Null after a failure. */
Driver* open_cuda(int32_t& status);
Driver* open_hip(int32_t& status);

/* Driver::blocks_at_once of a launch site's kernel, loading it if need be; 0 on the SIMT executor. */
int32_t blocks_at_once(const apex_place& place, apex_kernel* kernel, uint32_t threads, uint32_t dynamic_shared_bytes,
                       int32_t* blocks);

/* True in a process that fork() made from one that had loaded this library. */
bool is_forked_child();

}  // namespace apex
