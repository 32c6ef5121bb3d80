/* The C interface of libapex.so (apex.dll on Windows): choosing a variant, launching kernels, CPU variants.
 *
 * No torch, no Python, no vendor header. Every function returns a status or a plain value; none exits,
 * aborts or throws. Functions may be called from any thread, without the GIL.
 *
 * Sizes, dtypes and layouts are checked. Pointers are not: one that is null or reaches less memory than the sizes say
 * is undefined, unless its comment allows null.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif
#if !defined(_WIN32)
#define APEX_EXPORT __attribute__((visibility("default")))
#elif defined(APEX_BUILDS_LIBRARY)
#define APEX_EXPORT __declspec(dllexport)
#else
#define APEX_EXPORT __declspec(dllimport)
#endif

typedef enum apex_status {
  APEX_OK = 0,
  APEX_USE_REFERENCE = 1,    /* no variant of this library serves the op here: call the reference */
  APEX_ERROR_ARGUMENT = 2,   /* the caller's fault, a dtype or a pointer: apex_last_error() names the argument */
  APEX_ERROR_DRIVER = 3,     /* the vendor's driver refused; the text holds its code and name */
  APEX_ERROR_NO_DRIVER = 4,  /* the vendor's library is not here */
  APEX_ERROR_NO_KERNEL = 5,  /* a code object was registered but lacks the kernel */
  APEX_ERROR_FORKED = 6,     /* the driver was opened before fork() */
  APEX_ERROR_EXECUTOR = 7,   /* the SIMT executor (a test tool) reported a fault */
  APEX_ERROR_MEMORY = 8,     /* out of host memory */
  APEX_ERROR_NO_VARIANT = 9, /* the resolver gave no answer: a variant was forbidden, or it failed */
  APEX_ERROR_VALUE = 10,     /* the caller's fault, a size or a number: apex_last_error() says which */
  APEX_ERROR_WORKSPACE = 11, /* the caller's apex_workspace gave no memory */
  APEX_ERROR_INDEX = 12      /* the caller's fault, an index or a label; looked at on a CPU alone */
} apex_status;

/* Text of the last failure on this thread; valid until the next failing call on this thread. */
APEX_EXPORT const char* apex_last_error(void);
/* For a resolver that gives no answer: why. The text is copied. */
APEX_EXPORT void apex_set_last_error(const char* text);

typedef enum apex_dtype { APEX_F32 = 0, APEX_F16 = 1, APEX_BF16 = 2, APEX_F64 = 3 } apex_dtype;
typedef enum apex_platform { APEX_CPU = 0, APEX_CUDA = 1, APEX_HIP = 2 } apex_platform;

/* Where work runs: a device in torch's own order, and torch's current stream of that device. */
typedef struct apex_place {
  int32_t platform;
  int32_t device;
  void* stream;
} apex_place;

/* Memory that one call needs beside its arguments (partial sums): the call asks for it itself, from the thread that
 * called, so that each direction of an op is one call. What `take` hands out lies on the place, is aligned to 16 bytes
 * and stays until the work that was queued is over, as that of a stream-ordered allocator does; null: there is none,
 * which is answered by APEX_ERROR_WORKSPACE. */
typedef void* (*apex_take_workspace)(void* context, uint64_t bytes);
typedef struct apex_workspace {
  apex_take_workspace take;
  void* context;
} apex_workspace;

/* ---- which variant serves a unit ---------------------------------------------------------------
 * A unit is one device source (csrc/device/<unit>.cu). The choice is the probe's: at the first use of a
 * unit on a device this library calls the resolver, which registers a code object and answers. */
typedef enum apex_variant {
  APEX_VARIANT_UNKNOWN = 0,
  APEX_VARIANT_KERNEL = 1,   /* a code object was registered */
  APEX_VARIANT_CPU = 2,      /* the CPU variant of this library */
  APEX_VARIANT_REFERENCE = 3 /* nothing here: the caller runs the reference */
} apex_variant;

/* Called without any lock held, from any thread; threads that meet a new unit together may all call it. */
typedef int32_t (*apex_resolver)(int32_t platform, int32_t device, const char* unit);
/* Also drops every choice. Without a resolver: KERNEL where a code object is registered, else CPU on a CPU,
 * else REFERENCE. */
APEX_EXPORT void apex_set_resolver(apex_resolver resolver);
/* An apex_variant. UNKNOWN: the resolver gave none (a callback that raised answers 0), or an argument is wrong;
 * apex_last_error() says so, and the next call asks again. */
APEX_EXPORT int32_t apex_resolve(int32_t platform, int32_t device, const char* unit);
/* Drops every choice, so that the resolver is asked again. Loaded code objects stay loaded (graphs hold them). */
APEX_EXPORT void apex_forget_choices(void);

/* The image is copied. It is loaded at the unit's first launch on that device. Another image registered later
 * serves the launches after that; one that was registered before is not loaded twice. */
APEX_EXPORT int32_t apex_register_code_object(int32_t platform, int32_t device, const char* unit, const void* image,
                                              size_t bytes);
/* Highest level that CPU variants may use: of x86-64 1 (portable), 2, 3, 4; of aarch64 1 (NEON), 2 (SVE). Default: what
 * the processor has.
 * Setting clamps to what the machine has (0 asks for just that) and returns the level now in force. */
APEX_EXPORT int32_t apex_cpu_level(void);
APEX_EXPORT int32_t apex_set_cpu_level(int32_t level);

/* ---- launching ----------------------------------------------------------------------------------- */
typedef struct apex_dim { uint32_t x, y, z; } apex_dim;

/* A launch site's static handle: unit, kernel, and the slot that the first use fills in. */
typedef struct apex_kernel {
  const char* unit;
  const char* name;
  uint32_t slot; /* 0: none yet */
  /* 1: it begins with gpu::await_previous_kernel(), so that its launch may overlap the end of the kernel before it. */
  int32_t awaits;
} apex_kernel;

/* The one way to launch. `parameters` as cuLaunchKernel takes them.
 * - The device is the place's, whatever is current; current device and context are the same afterwards. A
 *   current context of the right device (a green context, one under MPS) is used as it is.
 * - A null stream is the legacy default stream of that device.
 * - The first launch on a device resolves the unit and loads its code object, also during a graph capture.
 * - A grid without blocks is no work: APEX_OK.
 * Release the GIL before it: the first launch may call the resolver. */
APEX_EXPORT int32_t apex_launch(const apex_place* place, apex_kernel* kernel, apex_dim grid, apex_dim block,
                                uint32_t dynamic_shared_bytes, void** parameters);

typedef struct apex_device_info {
  int32_t multiprocessors;
  int32_t warp_size;
  int64_t l2_bytes;
  int64_t shared_bytes_per_block; /* largest dynamic shared memory a block may ask for */
  int32_t driver_version;
  char arch[64]; /* sm_90, gfx942:sramecc+:xnack- */
} apex_device_info;
/* Asked from the device at every call. Of the CPU: APEX_ERROR_ARGUMENT. */
APEX_EXPORT int32_t apex_get_device_info(int32_t platform, int32_t device, apex_device_info* info);

/* 1 while the place's stream records a graph, 0 if not, negative: -status. */
APEX_EXPORT int32_t apex_is_capturing(const apex_place* place);

/* The folder of torch's own libraries (torch/lib). Where no HIP runtime is mapped yet, the one that torch's
 * libraries name is looked for from there. NULL: the folder of the libc10.so that is mapped. */
APEX_EXPORT int32_t apex_set_vendor_hint(const char* folder);

/* Where this process has a vendor's library of this stem ("libamdhip64.so", "libnvrtc.so"; a version follows):
 * the copy that is mapped, else the one that torch's libraries name, as a path, or as a name with a version where
 * only the system's loader can find it. Opens nothing. APEX_ERROR_NO_DRIVER: there is none. */
APEX_EXPORT int32_t apex_find_vendor_library(const char* stem, char* path, size_t bytes);

/* Test tool: kernels of every unit run on a SIMT executor when the place is a CPU. NULL takes it away. */
typedef const char* (*apex_executor)(const char* kernel, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
                                     uint32_t block_x, uint32_t block_y, uint32_t block_z, size_t dynamic_shared_bytes,
                                     uint32_t order, void** parameters);
APEX_EXPORT void apex_set_executor(apex_executor executor, uint32_t order);

/* ---- CPU variants use the caller's threads --------------------------------------------------------- */
typedef void (*apex_range_body)(void* context, int64_t begin, int64_t end);
typedef void (*apex_parallel_for)(int64_t begin, int64_t end, int64_t grain, apex_range_body body, void* context);
APEX_EXPORT void apex_set_parallel_for(apex_parallel_for parallel_for);
/* The threads of torch by its stable C interface: `function` is the address of torch_parallel_for, which
 * libtorch_cpu.so exports from torch 2.10 on. For callers without C++; null takes them away. */
APEX_EXPORT void apex_lend_torch_threads(void* function);

/* ---- this interface, for callers without its headers ------------------------------------------------
 * JSON: {"structs": {name: [[field, code], ...]}, "functions": {name: codes of result and arguments}}. Codes are
 * those of Python's struct module (P: a pointer, N: size_t, z: text, v: nothing); structs are laid out as C does. */
APEX_EXPORT const char* apex_interface(void);
/* SHA-256 of that text, in hexadecimal: what a module that was compiled against the headers compares. */
APEX_EXPORT const char* apex_interface_digest(void);

#if defined(__cplusplus)
}
#endif
