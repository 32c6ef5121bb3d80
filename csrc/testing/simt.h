// SIMT executor: runs unchanged device sources on the host, one fiber a thread, one block at a time.
// A test tool, never a product variant. This is the part that kernels see (through gpu.h, GPU_SIMT).
//
// Compile with -DGPU_SIMT -DGPU_WARP_SIZE=32 (or 64) and link fiber.cpp, block.cpp, fault.cpp, launch.cpp.
// Three builds show three kinds of error: plain (wrong results, deadlocks, time limits), AddressSanitizer +
// UBSan (bounds, alignment, overflow), and race.cpp (missing barriers on shared memory).
#pragma once
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#if !defined(GPU_WARP_SIZE)
#error "define GPU_WARP_SIZE as 32 or 64"
#endif

namespace simt {
constexpr unsigned warp_size = GPU_WARP_SIZE;
static_assert(warp_size == 32 || warp_size == 64, "GPU_WARP_SIZE is 32 or 64");

struct Dim { unsigned x = 1, y = 1, z = 1; };
struct Thread {
  Dim thread;  // its index in the block
  unsigned lane = 0, warp = 0;
};
struct Position { Dim block, block_size, grid; };

// The thread that runs now, and the block it belongs to. Only one block runs at any time.
extern Thread* self;
extern const Position* current;

// `line` is the caller's: threads of one block that meet in different lines are an error in the kernel.
void barrier(int line);
// A barrier of the warp alone: what __syncwarp orders.
void warp_barrier(int line);
// What a lane receives from one that is not there (left the kernel, or past the block's end): a NaN as
// half, bfloat16, float and double, so that using it shows.
constexpr unsigned long long absent = 0x7ffb7ffb7ffb7ffbull;
// Every live lane of the warp posts a value and receives the value of `from_lane`.
unsigned long long exchange(unsigned long long value, unsigned from_lane, int line);
// Bit k: lane k is there and its predicate holds.
unsigned long long ballot(bool predicate, int line);

// The shared array that `tag` names in this block. Each is an allocation of its own, so that
// AddressSanitizer guards both ends. Filled with 0xff: shared memory has no initial value.
void* shared(const void* tag, size_t bytes);
void* dynamic_shared();

// While one lives, the race detector takes accesses as atomic: they conflict only with plain ones.
// (Threads switch only in the functions above, so a plain read-modify-write is atomic here.)
extern volatile bool in_atomic;
struct Atomic {
  Atomic() {
    in_atomic = true;
    keep_order();
  }
  ~Atomic() {
    keep_order();
    in_atomic = false;
  }

 private:
  static void keep_order() { asm volatile("" ::: "memory"); }
};

// ---- kernels by name, arguments as cuLaunchKernel takes them -----------------------------------------
using Invoke = void (*)(void (*kernel)(), void* const* arguments);
void register_kernel(const char* name, void (*kernel)(), Invoke invoke, const size_t* sizes, unsigned count,
                     unsigned threads);

template <class... A> struct Invocation {
  // By memcpy, because a caller's argument bytes need not be aligned for A.
  template <class T> static T read(const void* from) {
    static_assert(std::is_trivially_copyable<T>::value, "kernel arguments are copied as bytes");
    alignas(T) unsigned char bytes[sizeof(T)];
    memcpy(bytes, from, sizeof(T));
    return *reinterpret_cast<T*>(bytes);
  }
  template <size_t... I> static void call(void (*kernel)(A...), void* const* arguments, std::index_sequence<I...>) {
    kernel(read<A>(arguments[I])...);
  }
  static void invoke(void (*kernel)(), void* const* arguments) {
    call(reinterpret_cast<void (*)(A...)>(kernel), arguments, std::index_sequence_for<A...>());
  }
};

// Specialized by GPU_KERNEL: the most threads that a block of the kernel may have.
template <int> struct LaunchBound;
template <class... Rest> constexpr unsigned first_of(unsigned first, Rest...) { return first; }

struct Registration {
  template <class... A> Registration(const char* name, void (*kernel)(A...), unsigned threads) {
    const size_t sizes[] = {sizeof(A)..., 0};
    register_kernel(name, reinterpret_cast<void (*)()>(kernel), &Invocation<A...>::invoke, sizes, sizeof...(A),
                    threads);
  }
};
}  // namespace simt
