// A libcuda.so.1 for tests: two devices (sm_90, sm_80), the rules about contexts, streams, captures and fork
// that the launch contract is about, and a log of what was called.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <utility>
#include <vector>

#include "fake.h"
#include "memory.h"
#include "shared.h"

using fake::note;

namespace {

constexpr int devices = 2;
const int arch[devices] = {90, 80};
constexpr int optin[devices] = {232448, 166912};

enum : int {
  kInvalidValue = 1,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kCaptureUnsupported = 900,
  kCaptureImplicit = 906,
};

struct Context {
  int device;
  std::string kind;  // primary, green
};
struct Stream {
  int device;
  bool capturing;
};
struct Library;
struct Kernel {
  Library* library;
  std::string name;
  int fixed;
  int most_dynamic[devices];
};
struct Library {
  std::string image;
  std::map<std::string, Kernel*> kernels;
};

int initialised_by = 0;
Context* primary[devices];
int retained[devices];
std::atomic<int> captures{0};  // in global mode, as torch.cuda.graph does by default
thread_local std::vector<Context*> stack;
thread_local int capture_mode = 0;

int begin(const char* call) {
  if (const int code = fake::failure(call)) return code;
  return initialised_by == getpid() ? 0 : kNotInitialized;
}

Context* current() { return stack.empty() ? nullptr : stack.back(); }

#define BEGIN(call) \
  if (const int code = begin(call)) return code

// What a capture in the global mode forbids to every thread that is not in the relaxed one.
int unsafe(const char* call) {
  if (captures == 0 || capture_mode == 2) return 0;
  note("%s broke a capture", call);
  return kCaptureUnsupported;
}

}  // namespace

// ---- the test's side

FAKE void* fake_context(int device, const char* kind) { return new Context{device, kind}; }
FAKE void* fake_primary(int device) { return primary[device]; }
FAKE void* fake_current() { return current(); }
FAKE int fake_depth() { return static_cast<int>(stack.size()); }
FAKE void fake_push(void* context) { stack.push_back(static_cast<Context*>(context)); }
FAKE void fake_empty_stack() { stack.clear(); }
FAKE void* fake_stream(int device) { return new Stream{device, false}; }
FAKE void fake_begin_capture(void* stream) { static_cast<Stream*>(stream)->capturing = true, ++captures; }
FAKE void fake_end_capture(void* stream) { static_cast<Stream*>(stream)->capturing = false, --captures; }
FAKE int fake_capture_mode() { return capture_mode; }
FAKE void fake_set_capture_mode(int mode) { capture_mode = mode; }
FAKE int fake_retained(int device) { return retained[device]; }

// ---- the driver's

FAKE int cuInit(unsigned) {
  if (const int code = fake::failure("cuInit")) return code;
  if (initialised_by && initialised_by != getpid()) return kNotInitialized;
  if (!initialised_by) note("cuInit");
  initialised_by = getpid();
  return 0;
}
FAKE int cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"},     {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {3, "CUDA_ERROR_NOT_INITIALIZED"},   {4, "CUDA_ERROR_DEINITIALIZED"},
      {100, "CUDA_ERROR_NO_DEVICE"},       {101, "CUDA_ERROR_INVALID_DEVICE"},
      {201, "CUDA_ERROR_INVALID_CONTEXT"}, {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {400, "CUDA_ERROR_INVALID_HANDLE"},  {500, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(code);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : 0;
}
FAKE int cuGetErrorString(int, const char** text) {
  *text = "words of the driver";
  return 0;
}
FAKE int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
FAKE int cuDeviceGet(int* device, int ordinal) {
  BEGIN("cuDeviceGet");
  if (ordinal < 0 || ordinal >= devices) return kInvalidDevice;
  *device = ordinal;
  return 0;
}
FAKE int cuDeviceGetAttribute(int* value, int attribute, int device) {
  BEGIN("cuDeviceGetAttribute");
  switch (attribute) {
    case 10:
      *value = 32;
      return 0;
    case 16:
      *value = 100 + device;
      return 0;
    case 38:
      *value = (50 + device) << 20;
      return 0;
    case 75:
      *value = arch[device] / 10;
      return 0;
    case 76:
      *value = arch[device] % 10;
      return 0;
    case 97:
      *value = optin[device];
      return 0;
    default:
      return kInvalidValue;
  }
}
FAKE int cuDevicePrimaryCtxRetain(void** context, int device) {
  BEGIN("cuDevicePrimaryCtxRetain");
  if (const int code = unsafe("cuDevicePrimaryCtxRetain")) return code;
  usleep(5000);  // so that threads meet here
  fake::Lock lock(fake::mutex);
  if (!primary[device]) primary[device] = new Context{device, "primary"};
  ++retained[device];
  note("retain %d", device);
  *context = primary[device];
  return 0;
}
FAKE int cuDevicePrimaryCtxRelease_v2(int device) {
  fake::Lock lock(fake::mutex);
  --retained[device];
  return 0;
}
FAKE int cuCtxGetCurrent(void** context) {
  BEGIN("cuCtxGetCurrent");
  *context = current();
  return 0;
}
FAKE int cuCtxGetDevice(int* device) {
  BEGIN("cuCtxGetDevice");
  if (!current()) return kInvalidContext;
  *device = current()->device;
  return 0;
}
FAKE int cuCtxPushCurrent_v2(void* context) {
  BEGIN("cuCtxPushCurrent");
  note("push %s %d", static_cast<Context*>(context)->kind.c_str(), static_cast<Context*>(context)->device);
  stack.push_back(static_cast<Context*>(context));
  return 0;
}
FAKE int cuCtxPopCurrent_v2(void** context) {
  BEGIN("cuCtxPopCurrent");
  if (stack.empty()) return kInvalidContext;
  note("pop");
  *context = stack.back();
  stack.pop_back();
  return 0;
}
FAKE int cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN("cuThreadExchangeStreamCaptureMode");
  note("mode %d", *mode);
  std::swap(*mode, capture_mode);
  return 0;
}
FAKE int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  BEGIN("cuMemAlloc");
  if (!current()) return kInvalidContext;
  if (const int broken = unsafe("cuMemAlloc")) return broken;
  void* memory = nullptr;
  if (const int code = fake::allocate(&memory, bytes)) return code;
  note("allocate %zu in %s %d", bytes, current()->kind.c_str(), current()->device);
  *address = reinterpret_cast<unsigned long long>(memory);
  return 0;
}
FAKE int cuMemFree_v2(unsigned long long address) {
  BEGIN("cuMemFree");
  if (const int broken = unsafe("cuMemFree")) return broken;
  note("free");
  return fake::release(reinterpret_cast<void*>(address)) ? 0 : kInvalidValue;
}
FAKE int cuIpcGetMemHandle(fake::Handle* handle, unsigned long long address) {
  BEGIN("cuIpcGetMemHandle");
  if (!current()) return kInvalidContext;
  return fake::get(handle, reinterpret_cast<void*>(address)) ? 0 : kInvalidValue;
}
FAKE int cuIpcOpenMemHandle_v2(unsigned long long* address, fake::Handle handle, unsigned flags) {
  BEGIN("cuIpcOpenMemHandle_v2");
  if (!current()) return kInvalidContext;
  if (const int broken = unsafe("cuIpcOpenMemHandle")) return broken;
  void* memory = nullptr;
  if (!fake::open(&memory, handle, flags)) return kInvalidValue;
  note("open in %s %d", current()->kind.c_str(), current()->device);
  *address = reinterpret_cast<unsigned long long>(memory);
  return 0;
}
FAKE int cuIpcCloseMemHandle(unsigned long long address) {
  BEGIN("cuIpcCloseMemHandle");
  return fake::close(reinterpret_cast<void*>(address)) ? 0 : kInvalidValue;
}
FAKE int cuStreamCreate(void** stream, unsigned flags) {
  BEGIN("cuStreamCreate");
  if (!current()) return kInvalidContext;
  if (flags != 1) return kInvalidValue;  // it would wait for the default stream
  *stream = new Stream{current()->device, false};
  return 0;
}
FAKE int cuStreamDestroy_v2(void* stream) {
  BEGIN("cuStreamDestroy");
  delete static_cast<Stream*>(stream);
  return 0;
}
FAKE int cuStreamSynchronize(void* stream) {
  BEGIN("cuStreamSynchronize");
  if (const int broken = unsafe("cuStreamSynchronize")) return broken;
  if (stream && static_cast<Stream*>(stream)->capturing) return kCaptureUnsupported;
  fake::run(stream);
  return 0;
}
FAKE int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t bytes, void* stream) {
  BEGIN("cuMemsetD8Async");
  if (!current()) return kInvalidContext;
  if (!stream && captures) {
    note("a memset on the default stream broke a capture");
    return kCaptureImplicit;
  }
  if (stream && static_cast<Stream*>(stream)->device != current()->device) return kInvalidHandle;
  const bool captured = stream && static_cast<Stream*>(stream)->capturing;
  note("memset %zu%s", bytes, captured ? ", captured" : "");
  if (!captured) fake::queue(stream, {reinterpret_cast<void*>(address), value, bytes});
  return 0;
}
FAKE int cuStreamIsCapturing(void* stream, int* status) {
  BEGIN("cuStreamIsCapturing");
  if (!current()) return kInvalidContext;
  *status = stream && static_cast<Stream*>(stream)->capturing ? 1 : 0;
  return 0;
}
#if !defined(FAKE_BEFORE_CUDA_12)
FAKE int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  BEGIN("cuLibraryLoadData");
  if (!current()) return kInvalidContext;
  if (const int broken = unsafe("cuLibraryLoadData")) return broken;
  const auto* image = static_cast<const char*>(code);
  note("load on %d: %.10s", current()->device, image);
  usleep(20000);  // so that threads meet here
  if (!fake::has_line(image, "arch sm_" + std::to_string(arch[current()->device]))) return kNoBinary;
  *library = new Library{image, {}};
  return 0;
}
#endif
FAKE int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  BEGIN("cuLibraryGetKernel");
  auto* of = static_cast<Library*>(library);
  fake::Lock lock(fake::mutex);
  if (!fake::has_line(of->image.c_str(), std::string("kernel ") + name)) return kNotFound;
  Kernel*& found = of->kernels[name];
  if (!found) found = new Kernel{of, name, fake::static_shared(of->image.c_str(), name), {49152, 49152}};
  note("find %s", name);
  *kernel = found;
  return 0;
}
FAKE int cuKernelGetFunction(void** function, void* kernel) {
  BEGIN("cuKernelGetFunction");
  if (!current()) return kInvalidContext;
  *function = kernel;
  return unsafe("cuKernelGetFunction");
}
FAKE int cuFuncLoad(void*) {
  BEGIN("cuFuncLoad");
  return unsafe("cuFuncLoad");
}
FAKE int cuKernelGetAttribute(int* value, int attribute, void* kernel, int) {
  BEGIN("cuKernelGetAttribute");
  const auto* of = static_cast<Kernel*>(kernel);
  if (attribute == 5)  // the virtual architecture it was compiled for
    *value = fake::has_line(of->library->image.c_str(), "arch sm_80") ||
                     fake::has_line(of->library->image.c_str(), "from compute_80")
                 ? 80
                 : 90;
  else if (attribute == 1) *value = of->fixed;
  else return kInvalidValue;
  return 0;
}
FAKE int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  BEGIN("cuKernelSetAttribute");
  auto* of = static_cast<Kernel*>(kernel);
  if (attribute != 8 || value + of->fixed > optin[device]) return kInvalidValue;
  of->most_dynamic[device] = value;
  return 0;
}
// As a program compiled with the vendor's header passes it.
struct LaunchConfig {
  unsigned gx, gy, gz, bx, by, bz, shared;
  void* stream;
  struct Attribute {
    int id;
    char padding[4];
    union {
      int overlaps;
      char bytes[64];
    } value;
  }* attributes;
  unsigned attribute_count;
};
FAKE int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                        void**);
#if !defined(FAKE_BEFORE_CUDA_12)
FAKE int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void** extra) {
  BEGIN("cuLaunchKernelEx");
  const auto* attribute = config->attributes;
  if (config->attribute_count != 1 || attribute->id != 6 || attribute->value.overlaps != 1) return kInvalidValue;
  note("beside the end of the one before");
  return cuLaunchKernel(function, config->gx, config->gy, config->gz, config->bx, config->by, config->bz,
                        config->shared, config->stream, parameters, extra);
}
#endif
FAKE int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void* stream, void** parameters, void** extra) {
  BEGIN("cuLaunchKernel");
  if (!current()) return kInvalidContext;
  auto* kernel = static_cast<Kernel*>(function);
  if (stream && static_cast<Stream*>(stream)->device != current()->device) return kInvalidHandle;
  if (extra || static_cast<int>(shared) > kernel->most_dynamic[current()->device]) return kInvalidValue;
  const long first = parameters ? *static_cast<int*>(parameters[0]) : 0;
  note("launch %s in %s %d, grid %u %u %u, block %u %u %u, shared %u, stream %s, first %ld", kernel->name.c_str(),
       current()->kind.c_str(), current()->device, gx, gy, gz, bx, by, bz, shared, stream ? "given" : "default", first);
  return 0;
}
