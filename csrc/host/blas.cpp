// Which library multiplies matrices, a handle of it for each device, and what is checked before it is asked.
#include "blas.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "driver.h"
#include "lt.h"
#include "status.h"
#include "table.h"

namespace apex {
namespace {

std::atomic<int32_t> wanted{APEX_BLAS_DEFAULT};

// The library of a platform. A failure to open it is kept until apex_set_blas: looking for it takes milliseconds.
struct Library {
  Library(const LtNumbers& numbers, bool by_default) : numbers(numbers), by_default(by_default) {}
  const LtNumbers& numbers;
  const bool by_default;
  std::atomic<const Lt*> lt{nullptr};
  std::atomic<bool> tried{false};
  std::mutex opening, devices_lock;
  char reason[256] = "";
  std::map<std::pair<int, void*>, LtDevice> devices;
};
Library* library_of(int32_t platform) {
  // Never destroyed: other threads may still multiply when the process ends.
  static auto* const cuda = new Library(cublaslt_numbers, true);
  static auto* const hip = new Library(hipblaslt_numbers, false);
  return platform == APEX_CUDA ? cuda : platform == APEX_HIP ? hip : nullptr;
}

// The open library, or null with the text of why torch multiplies.
const Lt* find(int32_t platform) {
  Library* const library = library_of(platform);
  if (!library) return fail(APEX_USE_REFERENCE, "torch multiplies on %s", platform_name(platform)), nullptr;
  const int32_t blas = wanted.load(std::memory_order_relaxed);
  if (blas == APEX_BLAS_TORCH) return fail(APEX_USE_REFERENCE, "torch was asked for (APEX_BLAS)"), nullptr;
  if (blas == APEX_BLAS_DEFAULT && !library->by_default)
    return fail(APEX_USE_REFERENCE, "%s has been measured on no card yet; APEX_BLAS=lt takes it",
                library->numbers.name),
           nullptr;
  if (const Lt* lt = library->lt.load(std::memory_order_acquire)) return lt;
  std::lock_guard<std::mutex> lock(library->opening);
  if (!library->lt && !library->tried) {
    library->lt.store(open_lt(library->numbers, library->reason, sizeof library->reason), std::memory_order_release);
    library->tried = true;
  }
  const Lt* const lt = library->lt;
  if (!lt) fail(APEX_USE_REFERENCE, "%s", library->reason);
  return lt;
}

// cublasLt's handle serves all streams of a device; hipBLASLt wants one for each.
int32_t device_of(const Lt& lt, const apex_place& place, Driver& driver, LtDevice* device) {
  Library& library = *library_of(place.platform);
  const std::pair<int, void*> key{place.device, place.platform == APEX_HIP ? place.stream : nullptr};
  std::lock_guard<std::mutex> lock(library.devices_lock);
  LtDevice& known = library.devices[key];
  if (!known.handle) {
    apex_device_info info;
    if (const int32_t status = driver.info(place.device, &info)) return status;
    if (!known.answers) known.answers = new LtAnswers;
    known.is_hopper = std::strcmp(info.arch, "sm_90") == 0;
    if (const int status = lt.api.create(&known.handle))
      return known.handle = nullptr,
             fail(APEX_USE_REFERENCE, "%sCreate failed with status %d", lt.numbers->prefix, status);
  }
  *device = known;
  return APEX_OK;
}

int32_t refuse(const char* why) { return fail(APEX_ERROR_ARGUMENT, "apex_matmul_run: %s", why); }

bool is_float(int32_t type) { return type == APEX_F32 || type == APEX_F16 || type == APEX_BF16; }

int32_t check(const apex_matmul& m) {
  if (m.m < 1 || m.n < 1 || m.k < 1) return refuse("m, n and k must be positive");
  if (!m.a || !m.b || !m.d) return refuse("a, b and d must not be null");
  if (m.ld_a < (m.transpose_a ? m.m : m.k) || m.ld_b < (m.transpose_b ? m.k : m.n) || m.ld_d < m.n)
    return refuse("a leading dimension is shorter than a row");
  if (m.epilogue < APEX_EPILOGUE_NONE || m.epilogue > APEX_EPILOGUE_BIAS_GRADIENT) return refuse("no such epilogue");
  if (m.epilogue == APEX_EPILOGUE_GELU_BIAS && (!m.aux || m.ld_aux < m.n))
    return refuse("aux is null, or its leading dimension shorter than a row");
  if (m.epilogue != APEX_EPILOGUE_NONE && !m.bias) return refuse("bias must not be null");
  if (m.workspace_bytes < 0 || (m.workspace_bytes > 0 && !m.workspace)) return refuse("workspace must not be null");
  // float64 is torch's: the vendor has no epilogues for it.
  if (!is_float(m.type) || !(m.type_d == m.type || m.type_d == APEX_F32))
    return fail(APEX_USE_REFERENCE, "torch multiplies these types");
  return APEX_OK;
}

struct Call {
  const Lt& lt;
  Driver& driver;
  const apex_place& place;
  const apex_matmul& matmul;
};
int32_t in_context(void* argument) {
  const auto& call = *static_cast<const Call*>(argument);
  LtDevice device;
  if (const int32_t status = device_of(call.lt, call.place, call.driver, &device)) return status;
  return run(call.lt, device, call.matmul, call.place.stream);
}

}  // namespace

int32_t blas_serves(int32_t platform) { return find(platform) ? APEX_OK : APEX_USE_REFERENCE; }
}  // namespace apex

extern "C" {

int32_t apex_matmul_run(const apex_place* place, const apex_matmul* matmul) {
  using namespace apex;
  return guarded([&]() -> int32_t {
    if (const int32_t status = check(*matmul)) return status;
    if (!is_place(place->platform, place->device)) return refuse("no such place");
    if (!library_of(place->platform)) return fail(APEX_USE_REFERENCE, "torch multiplies on a CPU");
    int32_t status;
    Driver* const driver = open_driver(place->platform, status);
    if (!driver) return status;
    const Lt* const lt = find(place->platform);
    if (!lt) return APEX_USE_REFERENCE;
    Call call{*lt, *driver, *place, *matmul};
    return driver->inside(place->device, in_context, &call);
  });
}

int32_t apex_set_blas(int32_t blas) {
  if (blas < APEX_BLAS_DEFAULT || blas > APEX_BLAS_TORCH)
    return apex::fail(APEX_ERROR_ARGUMENT, "apex_set_blas: there is no %d", blas);
  return apex::guarded([&] {
    apex::wanted = blas;
    for (const int32_t platform : {APEX_CUDA, APEX_HIP}) apex::library_of(platform)->tried = false;
    return int32_t{APEX_OK};
  });
}

int32_t apex_blas_name(int32_t platform, char* name, size_t bytes) {
  return apex::guarded([&]() -> int32_t {
    const apex::Lt* const lt = apex::find(platform);
    if (!lt) return APEX_USE_REFERENCE;
    apex::write_name(*lt, name, bytes);
    return APEX_OK;
  });
}
}
