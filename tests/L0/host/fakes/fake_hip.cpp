// A libamdhip64.so.7 for tests: two devices, the rules about devices, streams and captures that the launch
// contract is about, and a log of what was called. FAKE_NAME tells copies apart: it is part of the
// architecture's name.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <utility>
#include <vector>

#include "fake.h"
#include "memory.h"
#include "shared.h"

using fake::note;

#if !defined(FAKE_NAME)
#define FAKE_NAME "gfx942:sramecc+:xnack-"
#endif

namespace {

constexpr int devices = 2;
constexpr int lds[devices] = {65536, 163840};
enum : int {
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kCaptureUnsupported = 900,
  kCaptureImplicit = 906
};

struct Stream {
  int device;
  bool capturing;
};
struct Module {
  const char* image;  // not copied: HIP reads it later too
  int device;
  std::map<std::string, int> names;
};
struct Function {
  Module* module;
  std::string name;
};

std::atomic<int> captures{0};
thread_local int current = 0;
thread_local int capture_mode = 0;
thread_local int last_error = 0;

int keep(int code) {
  if (code) last_error = code;
  return code;
}

int unsafe(const char* call) {
  if (captures == 0 || capture_mode == 2) return 0;
  note("%s broke a capture", call);
  return kCaptureUnsupported;
}

#define BEGIN(call) \
  if (const int code = fake::failure(call)) return keep(code)

}  // namespace

// ---- the test's side

FAKE int fake_current() { return current; }
FAKE void fake_set_current(int device) { current = device; }
FAKE int fake_last_error() { return last_error; }
FAKE void* fake_stream(int device) { return new Stream{device, false}; }
FAKE void fake_begin_capture(void* stream) { static_cast<Stream*>(stream)->capturing = true, ++captures; }
FAKE void fake_end_capture(void* stream) { static_cast<Stream*>(stream)->capturing = false, --captures; }
FAKE int fake_capture_mode() { return capture_mode; }
FAKE void fake_set_capture_mode(int mode) { capture_mode = mode; }

// ---- the runtime's

FAKE int hipInit(unsigned) { return keep(fake::failure("hipInit")); }
FAKE const char* hipGetErrorName(int code) {
  switch (code) {
    case kInvalidValue:
      return "hipErrorInvalidValue";
    case kInvalidDevice:
      return "hipErrorInvalidDevice";
    case kNoBinary:
      return "hipErrorNoBinaryForGpu";
    case kInvalidHandle:
      return "hipErrorInvalidHandle";
    default:
      return "hipErrorUnknown";
  }
}
FAKE const char* hipGetErrorString(int) { return "words of the runtime"; }
FAKE int hipGetLastError() { return std::exchange(last_error, 0); }
FAKE int hipDriverGetVersion(int* version) {
  *version = 70253211;
  return 0;
}
FAKE int hipGetDevice(int* device) {
  BEGIN("hipGetDevice");
  *device = current;
  return 0;
}
FAKE int hipSetDevice(int device) {
  BEGIN("hipSetDevice");
  if (device < 0 || device >= devices) return keep(kInvalidDevice);
  note("set %d", device);
  current = device;
  return 0;
}
FAKE int hipDeviceGetAttribute(int* value, int attribute, int device) {
  BEGIN("hipDeviceGetAttribute");
  if (device < 0 || device >= devices) return keep(kInvalidDevice);
  switch (attribute) {
    case 19:
      *value = (4 + device) << 20;
      return 0;
    case 63:
      *value = 304 + device;
      return 0;
    case 74:
      *value = lds[device];
      return 0;
    case 87:
      *value = device ? 32 : 64;
      return 0;
    default:
      return keep(kInvalidValue);
  }
}
FAKE int hipGetDevicePropertiesR0600(void* properties, int device) {
  memset(properties, 0x7f, 1472);  // the size of the structure
  snprintf(static_cast<char*>(properties) + 1160, 256, "%s", device ? "gfx1100" : FAKE_NAME);
  return 0;
}
FAKE int hipModuleLoadData(void** module, const void* image) {
  BEGIN("hipModuleLoadData");
  if (const int code = unsafe("hipModuleLoadData")) return keep(code);
  note("load on %d", current);
  usleep(20000);  // so that threads meet here
  if (!fake::has_line(static_cast<const char*>(image), current ? "arch gfx1100" : "arch gfx942"))
    return keep(kNoBinary);
  *module = new Module{static_cast<const char*>(image), current, {}};
  return 0;
}
FAKE int hipModuleGetFunction(void** function, void* module, const char* name) {
  BEGIN("hipModuleGetFunction");
  auto* of = static_cast<Module*>(module);
  if (!fake::has_line(of->image, std::string("kernel ") + name)) return keep(kNotFound);
  note("find %s", name);
  *function = new Function{of, name};
  return 0;
}
FAKE int hipThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN("hipThreadExchangeStreamCaptureMode");
  note("mode %d", *mode);
  std::swap(*mode, capture_mode);
  return 0;
}
FAKE int hipMalloc(void** memory, size_t bytes) {
  BEGIN("hipMalloc");
  if (const int code = unsafe("hipMalloc")) return keep(code);
  if (const int code = fake::allocate(memory, bytes)) return keep(code);
  note("allocate %zu on %d", bytes, current);
  return 0;
}
FAKE int hipExtMallocWithFlags(void** memory, size_t bytes, unsigned flags) {
  BEGIN("hipExtMallocWithFlags");
  if (const int code = unsafe("hipExtMallocWithFlags")) return keep(code);
  if (const int code = fake::allocate(memory, bytes)) return keep(code);
  note("allocate %zu on %d with %u", bytes, current, flags);
  return 0;
}
FAKE int hipIpcGetMemHandle(fake::Handle* handle, void* memory) {
  BEGIN("hipIpcGetMemHandle");
  return fake::get(handle, memory) ? 0 : keep(kInvalidValue);
}
FAKE int hipIpcOpenMemHandle(void** memory, fake::Handle handle, unsigned flags) {
  BEGIN("hipIpcOpenMemHandle");
  if (const int code = unsafe("hipIpcOpenMemHandle")) return keep(code);
  if (!fake::open(memory, handle, flags)) return keep(kInvalidValue);
  note("open on %d", current);
  return 0;
}
FAKE int hipIpcCloseMemHandle(void* memory) {
  BEGIN("hipIpcCloseMemHandle");
  return fake::close(memory) ? 0 : keep(kInvalidValue);
}
FAKE int hipFree(void* memory) {
  BEGIN("hipFree");
  if (const int code = unsafe("hipFree")) return keep(code);
  note("free");
  return fake::release(memory) ? 0 : keep(kInvalidValue);
}
FAKE int hipStreamCreateWithFlags(void** stream, unsigned flags) {
  BEGIN("hipStreamCreateWithFlags");
  if (flags != 1) return keep(kInvalidValue);  // it would wait for the default stream
  *stream = new Stream{current, false};
  return 0;
}
FAKE int hipStreamDestroy(void* stream) {
  BEGIN("hipStreamDestroy");
  delete static_cast<Stream*>(stream);
  return 0;
}
FAKE int hipStreamSynchronize(void* stream) {
  BEGIN("hipStreamSynchronize");
  if (const int code = unsafe("hipStreamSynchronize")) return keep(code);
  if (stream && static_cast<Stream*>(stream)->capturing) return keep(kCaptureUnsupported);
  fake::run(stream);
  return 0;
}
FAKE int hipMemsetAsync(void* memory, int value, size_t bytes, void* stream) {
  BEGIN("hipMemsetAsync");
  if (!stream && captures) {
    note("a memset on the default stream broke a capture");
    return keep(kCaptureImplicit);
  }
  if (stream && static_cast<Stream*>(stream)->device != current) return keep(kInvalidHandle);
  const bool captured = stream && static_cast<Stream*>(stream)->capturing;
  note("memset %zu%s", bytes, captured ? ", captured" : "");
  if (!captured) fake::queue(stream, {memory, static_cast<unsigned char>(value), bytes});
  return 0;
}
FAKE int hipStreamIsCapturing(void* stream, int* status) {
  BEGIN("hipStreamIsCapturing");
  *status = stream && static_cast<Stream*>(stream)->capturing ? 1 : 0;
  return 0;
}
FAKE int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
  BEGIN("hipModuleLaunchKernel");
  auto* kernel = static_cast<Function*>(function);
  if (kernel->module->device != current) return keep(kInvalidHandle);
  if (stream && static_cast<Stream*>(stream)->device != current) return keep(kInvalidHandle);
  if (extra || static_cast<int>(shared) > lds[current]) return keep(kInvalidValue);
  const long first = parameters ? *static_cast<int*>(parameters[0]) : 0;
  note("launch %s on %d, grid %u %u %u, block %u %u %u, shared %u, stream %s, first %ld", kernel->name.c_str(), current,
       gx, gy, gz, bx, by, bz, shared, stream ? "given" : "default", first);
  return 0;
}
