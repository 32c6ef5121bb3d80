// The C face of the executor, which ctypes and libapex call (apex_set_executor in csrc/host/apex.h).
#include <map>
#include <mutex>
#include "block.h"
#include "fault.h"

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

namespace simt {
namespace {
struct Kernel {
  void (*function)();
  Invoke invoke;
  std::vector<size_t> sizes;
  unsigned threads;  // of a block, at most
};
// A function's static: registrations run before main, in any order.
std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}
const Kernel* find_kernel(const char* name) {
  const auto k = kernels().find(name);
  return k == kernels().end() ? nullptr : &k->second;
}

std::mutex one_launch_at_a_time;  // callers may be any threads; fibers, self and current are one set
std::vector<Fiber> pool;          // fibers of earlier launches, for their stacks
long long only_block = -1;

struct Call {
  const Kernel* kernel;
  void* const* arguments;
};

std::string check_launch(const Dim& grid, const Dim& size, unsigned bound) {
  const auto text = [](const Dim& d) {
    return std::to_string(d.x) + "x" + std::to_string(d.y) + "x" + std::to_string(d.z);
  };
  const std::string what = "bad launch: grid " + text(grid) + ", block " + text(size);
  const unsigned long long threads = 1ull * size.x * size.y * size.z;
  if (threads == 0 || threads > 1024 || size.z > 64) return what + ": a block has 1 to 1024 threads, at most 64 in z";
  if (threads > bound) return what + ": GPU_KERNEL says at most " + std::to_string(bound) + " threads";
  if (1ull * grid.x * grid.y * grid.z == 0) return what + ": the grid is empty";
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return what + ": a grid is at most 2147483647x65535x65535";
  if (1ull * grid.x * size.x > 0xffffffffull) return what + ": HIP takes less than 2^32 threads in x";
  return "";
}

// A number without a common factor with n, so that steps of it visit every block once.
unsigned long long stride_for(unsigned long long n, unsigned order) {
  unsigned long long stride = (order * 2654435761ull) % n;
  for (;; ++stride) {
    unsigned long long a = n, b = stride % n;
    while (b) {
      const unsigned long long r = a % b;
      a = b;
      b = r;
    }
    if (a == 1) return stride;
  }
}

void run_grid(Block& b, size_t dynamic_bytes, unsigned order) {
  const Dim& g = b.grid;
  const unsigned long long n = 1ull * g.x * g.y * g.z;
  const bool one = only_block >= 0;
  if (one && static_cast<unsigned long long>(only_block) >= n) return b.fail("simt_only_block is past the grid");
  const unsigned long long stride = order > 1 ? stride_for(n, order) : 1;
  unsigned long long at = one ? static_cast<unsigned long long>(only_block) : order == 1 ? n - 1 : 0;
  for (unsigned long long done = 0; done < (one ? 1 : n) && b.error.empty(); ++done) {
    b.block = {static_cast<unsigned>(at % g.x), static_cast<unsigned>(at / g.x % g.y),
               static_cast<unsigned>(at / g.x / g.y)};
    run_block(b, dynamic_bytes, order);
    at = order == 1 ? at - 1 : (at + stride) % n;
  }
}

std::string launch(const Kernel& kernel, Dim grid, Dim size, size_t dynamic_bytes, unsigned order,
                   void* const* arguments) {
  std::string wrong = check_launch(grid, size, kernel.threads);
  if (!wrong.empty()) return wrong;
  std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  Block b;
  Call call = {&kernel, arguments};
  b.grid = grid;
  b.block_size = size;
  b.body = [](void* c) {
    const Call& made = *static_cast<Call*>(c);
    made.kernel->invoke(made.kernel->function, made.arguments);
  };
  b.body_argument = &call;
  b.fibers.swap(pool);
  if (b.fibers.size() < b.threads()) b.fibers.resize(b.threads());
  block = &b;
  current = &b;
  {
    FaultGuard guard;
    run_grid(b, dynamic_bytes, order);
  }
  block = nullptr;
  current = nullptr;
  pool.swap(b.fibers);
  return b.error;
}
}  // namespace

void register_kernel(const char* name, void (*function)(), Invoke invoke, const size_t* sizes, unsigned count,
                     unsigned threads) {
  kernels()[name] = {function, invoke, std::vector<size_t>(sizes, sizes + count), threads};
}
}  // namespace simt

// Runs a kernel to its end. Null: no fault, else what went wrong; valid until this thread's next launch.
SIMT_EXPORT const char* simt_launch(const char* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                    unsigned block_x, unsigned block_y, unsigned block_z, size_t dynamic_shared_bytes,
                                    unsigned order, void** parameters) {
  static thread_local std::string error;
  const simt::Kernel* k = simt::find_kernel(kernel);
  if (!k) error = std::string("no kernel ") + kernel;
  else
    error = simt::launch(*k, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_shared_bytes, order,
                         parameters);
  return error.empty() ? nullptr : error.c_str();
}

// One block of every launch, by its linear index: 64-bit indexing is tested on sparse memory that way. -1: all.
SIMT_EXPORT void simt_only_block(long long linear_index) { simt::only_block = linear_index; }
// CPU seconds that a launch may take: a thread that spins on another block would never end.
SIMT_EXPORT void simt_time_limit(double seconds) { simt::time_limit_seconds = seconds; }
SIMT_EXPORT unsigned simt_warp_size() { return simt::warp_size; }

// What is in here: the name of kernel `index` in alphabetic order (null past the end), its parameters' sizes.
SIMT_EXPORT const char* simt_kernel_name(unsigned index) {
  for (const auto& k : simt::kernels())
    if (!index--) return k.first.c_str();
  return nullptr;
}
SIMT_EXPORT int simt_parameter_count(const char* kernel) {
  const simt::Kernel* k = simt::find_kernel(kernel);
  return k ? static_cast<int>(k->sizes.size()) : -1;
}
SIMT_EXPORT size_t simt_parameter_bytes(const char* kernel, unsigned index) {
  const simt::Kernel* k = simt::find_kernel(kernel);
  return k && index < k->sizes.size() ? k->sizes[index] : 0;
}
