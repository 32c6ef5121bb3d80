// Race detector for shared memory: the calls that -fsanitize=thread puts before every access, without the
// runtime they were made for. Device sources are compiled with that flag, the executor is not.
//
// Two accesses of different threads to one byte, at least one a write, not both atomic, and no barrier of the
// block (or, within a warp, of the warp) between them, are a race. Whether the schedule happened to make the
// result wrong does not matter. Shuffles order nothing. Memory outside shared arrays is not watched, nor is
// what memcpy and memset touch when the compiler leaves them calls.
#include <cstdio>
#include <vector>
#include "block.h"
#include "fault.h"

namespace simt {
namespace {
constexpr unsigned nobody = ~0u;

// One access to a byte: by whom, and how many barriers that thread had passed.
struct Access {
  unsigned thread = nobody, barriers = 0, warp_barriers = 0;
  bool atomic = false;
  const void* pc = nullptr;

  // Not ordered before what `f` does now.
  bool concurrent_with(const Fiber& f) const {
    const unsigned t = f.warp * warp_size + f.lane;
    if (thread == nobody || thread == t || barriers != f.barriers) return false;
    return thread / warp_size != f.warp || warp_barriers == f.warp_barriers;
  }
};
// The last access of a kind, and the last by another thread before it: with one alone, a thread that reads
// what others read too and then writes it would hide them (and so would its own atomic after theirs).
struct Last {
  Access by, by_another;

  void note(const Access& a) {
    if (by.thread != a.thread) by_another = by;
    by = a;
  }
};
struct Byte { Last write, read; };

std::vector<Byte> bytes_of[Block::most_arrays];  // of each shared array, made at its first access

const SharedArray* find_array(const Block& b, const char* at, unsigned& index) {
  for (index = 0; index < b.array_count; ++index) {
    const SharedArray& a = b.arrays[index];
    if (at >= a.begin && at < a.begin + a.bytes) return &a;
  }
  return nullptr;
}

std::string say(const Access& a, const char* did) {
  return "thread " + std::to_string(a.thread) + " " + (a.atomic ? "atomically " : "") + did + " it in " +
         describe_code(static_cast<const char*>(a.pc) - 1);  // a return address: the call is before it
}

void report(const Access& before, const char* did, const Access& now, const char* does, const SharedArray& array,
            size_t offset) {
  const std::string name =
      array.tag ? "of a shared array of " + std::to_string(array.bytes) + " bytes" : "of dynamic shared memory";
  block->fail("race: no barrier between two accesses to byte " + std::to_string(offset) + " " + name + ": " +
              say(before, did) + ", then " + say(now, does));
}

void touch(const void* address, size_t size, bool write, bool atomic, const void* pc) {
  Block* b = block;
  if (!b || !self || !in_kernel) return;
  unsigned index;
  const char* at = static_cast<const char*>(address);
  const SharedArray* array = find_array(*b, at, index);
  if (!array) return;
  ExecutorCode scope;
  const Fiber& f = *static_cast<Fiber*>(self);
  const Access now = {f.warp * warp_size + f.lane, f.barriers, f.warp_barriers, atomic || in_atomic, pc};
  if (bytes_of[index].empty()) bytes_of[index].resize(array->bytes);
  const size_t begin = static_cast<size_t>(at - array->begin);
  for (size_t i = begin; i < begin + size && i < array->bytes; ++i) {
    Byte& byte = bytes_of[index][i];
    const auto conflicts = [&](const Access& a) { return a.concurrent_with(f) && !(a.atomic && now.atomic); };
    const auto check = [&](const Last& last, const char* did) {
      for (const Access* a : {&last.by, &last.by_another})
        if (b->error.empty() && conflicts(*a)) report(*a, did, now, write ? "writes" : "reads", *array, i);
    };
    check(byte.write, "wrote");
    if (write) check(byte.read, "read");
    (write ? byte.write : byte.read).note(now);
  }
}

struct Install {
  Install() {
    on_block_end = [] {
      for (auto& bytes : bytes_of) bytes.clear();
    };
  }
} install;
}  // namespace
}  // namespace simt

#define SIMT_HOOK extern "C" __attribute__((visibility("hidden")))
#define SIMT_PC __builtin_return_address(0)

#define SIMT_ACCESS(n)                                                                           \
  SIMT_HOOK void __tsan_read##n(void* p) { simt::touch(p, n, false, false, SIMT_PC); }           \
  SIMT_HOOK void __tsan_write##n(void* p) { simt::touch(p, n, true, false, SIMT_PC); }           \
  SIMT_HOOK void __tsan_unaligned_read##n(void* p) { simt::touch(p, n, false, false, SIMT_PC); } \
  SIMT_HOOK void __tsan_unaligned_write##n(void* p) { simt::touch(p, n, true, false, SIMT_PC); }
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
SIMT_HOOK void __tsan_read_range(void* p, size_t n) { simt::touch(p, n, false, false, SIMT_PC); }
SIMT_HOOK void __tsan_write_range(void* p, size_t n) { simt::touch(p, n, true, false, SIMT_PC); }
SIMT_HOOK void __tsan_init() {}
SIMT_HOOK void __tsan_func_entry(void*) {}
SIMT_HOOK void __tsan_func_exit() {}
SIMT_HOOK void __tsan_vptr_update(void*, void*) {}
SIMT_HOOK void __tsan_vptr_read(void*) {}

// The compiler's __atomic builtins come here instead of being instructions. One thread runs at a time.
#define SIMT_ATOMIC_UPDATE(bits, T, name, result)                         \
  SIMT_HOOK T __tsan_atomic##bits##_##name(volatile T* p, T value, int) { \
    simt::touch(const_cast<T*>(p), sizeof(T), true, true, SIMT_PC);       \
    const T old = *p;                                                     \
    *p = static_cast<T>(result);                                          \
    return old;                                                           \
  }
#define SIMT_ATOMIC_COMPARE(bits, T, name)                                                      \
  SIMT_HOOK int __tsan_atomic##bits##_##name(volatile T* p, T* expected, T desired, int, int) { \
    simt::touch(const_cast<T*>(p), sizeof(T), true, true, SIMT_PC);                             \
    const T old = *p;                                                                           \
    const bool same = old == *expected;                                                         \
    if (same) *p = desired;                                                                     \
    else *expected = old;                                                                       \
    return same;                                                                                \
  }
#define SIMT_ATOMIC(bits, T)                                                \
  SIMT_HOOK T __tsan_atomic##bits##_load(const volatile T* p, int) {        \
    simt::touch(const_cast<T*>(p), sizeof(T), false, true, SIMT_PC);        \
    return *p;                                                              \
  }                                                                         \
  SIMT_HOOK void __tsan_atomic##bits##_store(volatile T* p, T value, int) { \
    simt::touch(const_cast<T*>(p), sizeof(T), true, true, SIMT_PC);         \
    *p = value;                                                             \
  }                                                                         \
  SIMT_ATOMIC_UPDATE(bits, T, exchange, value)                              \
  SIMT_ATOMIC_UPDATE(bits, T, fetch_add, old + value)                       \
  SIMT_ATOMIC_UPDATE(bits, T, fetch_sub, old - value)                       \
  SIMT_ATOMIC_UPDATE(bits, T, fetch_and, old& value)                        \
  SIMT_ATOMIC_UPDATE(bits, T, fetch_or, old | value)                        \
  SIMT_ATOMIC_UPDATE(bits, T, fetch_xor, old ^ value)                       \
  SIMT_ATOMIC_UPDATE(bits, T, fetch_nand, ~(old & value))                   \
  SIMT_ATOMIC_COMPARE(bits, T, compare_exchange_strong)                     \
  SIMT_ATOMIC_COMPARE(bits, T, compare_exchange_weak)
SIMT_ATOMIC(8, unsigned char)
SIMT_ATOMIC(16, unsigned short)
SIMT_ATOMIC(32, unsigned)
SIMT_ATOMIC(64, unsigned long long)
SIMT_HOOK void __tsan_atomic_thread_fence(int) {}
SIMT_HOOK void __tsan_atomic_signal_fence(int) {}
