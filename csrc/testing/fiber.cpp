#include "fiber.h"
#include <sys/mman.h>
#if SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Code that runs while no stack is quite the current one must not be instrumented.
#define SIMT_RAW __attribute__((noinline, no_sanitize("address", "undefined", "thread")))

namespace simt {
Thread* self = nullptr;
volatile bool in_kernel = false;

namespace {
constexpr size_t stack_bytes = 256 << 10, guard_bytes = 4096;
constexpr unsigned colours = 61;
constexpr size_t colour_bytes = 192;

#if SIMT_USES_UCONTEXT
ucontext_t scheduler;
#else
void* scheduler = nullptr;

// Saves the callee-saved registers and swaps stacks: 9 ns, where swapcontext makes a system call (183 ns).
__attribute__((naked, noinline, used)) void switch_stack(void** /*save*/, void* /*to*/) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}
#endif
#if SIMT_ASAN
void* scheduler_fake_stack = nullptr;
const void* scheduler_bottom = nullptr;
size_t scheduler_size = 0;
#endif

SIMT_RAW void first_entry(void (*entry)()) {
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
  entry();
  __builtin_unreachable();
}
// The entry travels in a variable: a fresh stack has no arguments.
void (*pending_entry)() = nullptr;
SIMT_RAW void trampoline() { first_entry(pending_entry); }

SIMT_RAW void note_use(Fiber& fiber, void* stack_pointer) {
  char* used = static_cast<char*>(stack_pointer) - 1024;  // a frame and the pushed registers lie below it
  fiber.used_from = used < fiber.stack ? fiber.stack : used;
}

bool make_stack(Fiber& fiber) {
  void* memory = mmap(nullptr, stack_bytes + guard_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  mprotect(memory, guard_bytes, PROT_NONE);
  fiber.stack = static_cast<char*>(memory) + guard_bytes;
  return true;
}
}  // namespace

bool prepare(Fiber& fiber, void (*entry)()) {
  if (!fiber.stack && !make_stack(fiber)) return false;
  char* const end = fiber.stack + stack_bytes;
#if SIMT_ASAN
  // The last run's frames never returned, so what they poisoned still is. Clearing only the part that was
  // used costs 0.15 us a thread, the whole stack ten times that.
  char* used = fiber.used_from ? static_cast<char*>(fiber.used_from) : end;
  __asan_unpoison_memory_region(used, static_cast<size_t>(end - used));
#endif
  pending_entry = entry;
#if SIMT_USES_UCONTEXT
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, trampoline, 0);
  fiber.used_from = fiber.stack;
#else
  // Stacks are page-aligned: without a colour their hot lines would all fall into one cache set.
  void** top = reinterpret_cast<void**>(end - 16 - (fiber.lane + fiber.warp * warp_size) % colours * colour_bytes);
  *--top = nullptr;  // so that the stack is aligned as after a call
  *--top = reinterpret_cast<void*>(&trampoline);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.context = top;
#endif
  fiber.fake_stack = nullptr;
  fiber.state = State::ready;
  fiber.line = 0;
  fiber.barriers = fiber.warp_barriers = 0;
  return true;
}

SIMT_RAW void resume(Fiber& fiber) {
  self = &fiber;
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, stack_bytes);
#endif
#if SIMT_USES_UCONTEXT
  swapcontext(&scheduler, &fiber.context);
#else
  switch_stack(&scheduler, fiber.context);
#endif
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
  self = nullptr;
}

SIMT_RAW void suspend(bool last) {
  Fiber* fiber = static_cast<Fiber*>(self);
  (void)last;
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(last ? nullptr : &fiber->fake_stack, scheduler_bottom, scheduler_size);
#endif
#if SIMT_USES_UCONTEXT
  swapcontext(&fiber->context, &scheduler);
#else
  note_use(*fiber, __builtin_frame_address(0));
  switch_stack(&fiber->context, scheduler);
#endif
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &scheduler_bottom, &scheduler_size);
#endif
}

SIMT_RAW void abandon(void* stack_pointer) {
  Fiber* fiber = static_cast<Fiber*>(self);
  note_use(*fiber, stack_pointer);
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(nullptr, scheduler_bottom, scheduler_size);
#endif
#if SIMT_USES_UCONTEXT
  setcontext(&scheduler);
#else
  void* dropped;
  switch_stack(&dropped, scheduler);
#endif
  __builtin_unreachable();
}

bool in_guard(const Fiber& fiber, const void* address) {
  const char* a = static_cast<const char*>(address);
  return fiber.stack && a >= fiber.stack - guard_bytes && a < fiber.stack;
}
}  // namespace simt
