#include "cpu_level.h"

#include <atomic>

#include "apex.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)
constexpr unsigned bit(int index) { return 1u << index; }
constexpr bool has(unsigned word, unsigned wanted) { return (word & wanted) == wanted; }

// Which register files the operating system saves on a task switch. A processor may have AVX while the
// kernel (or a hypervisor) leaves its registers unsaved; using them then faults.
unsigned saved_state() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// The levels of the x86-64 psABI, section 3.1.1.
int detect() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 1;
  const unsigned leaf1 = c;
  unsigned extended = 0;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d)) extended = c;
  // SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT; LAHF
  if (!has(leaf1, bit(0) | bit(9) | bit(13) | bit(19) | bit(20) | bit(23)) || !has(extended, bit(0))) return 1;

  // FMA, MOVBE, OSXSAVE, AVX, F16C; LZCNT
  if (!has(leaf1, bit(12) | bit(22) | bit(27) | bit(28) | bit(29)) || !has(extended, bit(5))) return 2;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 2;
  const unsigned leaf7 = b;
  if (!has(leaf7, bit(3) | bit(5) | bit(8))) return 2;  // BMI1, AVX2, BMI2
  const unsigned saved = saved_state();
  if (!has(saved, bit(1) | bit(2))) return 2;  // XMM, YMM

  // AVX512F, DQ, CD, BW, VL; opmask, upper halves of ZMM0-15, ZMM16-31
  if (!has(leaf7, bit(16) | bit(17) | bit(28) | bit(30) | bit(31)) || !has(saved, bit(5) | bit(6) | bit(7))) return 3;
  return 4;
}
bool detect_bfloat16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, bit(5));
}
#elif defined(__aarch64__)
// Bit 22 of AT_HWCAP, HWCAP_SVE: the processor has it, and the operating system saves its registers.
int detect() { return getauxval(AT_HWCAP) >> 22 & 1 ? 2 : 1; }
#else
int detect() { return 1; }
#endif

std::atomic<int> machine{0};
std::atomic<int> in_force{0};  // 0: not lowered

}  // namespace

namespace apex {

bool machine_has_bfloat16() {
#if defined(__x86_64__)
  return machine_cpu_level() >= 4 && detect_bfloat16();
#else
  return false;
#endif
}

int machine_cpu_level() {
  int level = machine.load(std::memory_order_relaxed);
  if (level == 0) {
    level = detect();  // two threads may both ask; the answer is the same
    machine.store(level, std::memory_order_relaxed);
  }
  return level;
}

int cpu_level() {
  const int level = in_force.load(std::memory_order_relaxed);
  return level ? level : machine_cpu_level();
}

}  // namespace apex

extern "C" int32_t apex_cpu_level(void) { return apex::cpu_level(); }

extern "C" int32_t apex_set_cpu_level(int32_t level) {
  const int most = apex::machine_cpu_level();
  in_force.store(level <= 0 || level > most ? most : level, std::memory_order_relaxed);
  return apex::cpu_level();
}
