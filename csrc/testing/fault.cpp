#include "fault.h"
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>

#define SIMT_RAW __attribute__((noinline, no_sanitize("address", "undefined", "thread")))

namespace simt {
double time_limit_seconds = 120;

namespace {
#if SIMT_ASAN
constexpr int memory_signals = 0;
#else
constexpr int memory_signals = 4;
#endif
constexpr int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGXCPU};
constexpr int signal_count = sizeof signals / sizeof *signals, time_signal = SIGXCPU;

// Written by the handler, read by the scheduler on the same thread.
volatile int fault_signal = 0;
void* volatile fault_address = nullptr;
void* volatile fault_pc = nullptr;
volatile bool time_is_up = false;

pthread_t guarded_thread;
struct sigaction saved_actions[signal_count];
stack_t saved_stack;
char* handler_stack = nullptr;  // a kernel's own may be the one that overflowed
timer_t timer;
bool have_timer = false;

SIMT_RAW void on_signal(int number, siginfo_t* information, void* context) {
  if (number == time_signal) {
    time_is_up = true;
  } else if (!pthread_equal(pthread_self(), guarded_thread) || !in_kernel) {
    // Not a kernel's: let it happen again as if this handler had never been.
    for (int i = 0; i < signal_count; ++i)
      if (signals[i] == number) sigaction(number, &saved_actions[i], nullptr);
    return;
  }
  if (!in_kernel) return;  // the executor's own code: the scheduler will look, or the next tick finds the kernel
  in_kernel = false;
  void *pc = nullptr, *stack_pointer = __builtin_frame_address(0);
#if defined(__x86_64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  pc = reinterpret_cast<void*>(registers[REG_RIP]);
  stack_pointer = reinterpret_cast<void*>(registers[REG_RSP]);
#else
  (void)context;
#endif
  fault_signal = number;
  fault_address = information->si_addr;
  fault_pc = pc;
  abandon(stack_pointer);
}

void start_timer() {
  struct sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = time_signal;
  event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
  have_timer = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0;
  if (!have_timer) return;
  struct itimerspec when = {};
  when.it_value.tv_sec = static_cast<time_t>(time_limit_seconds);
  when.it_value.tv_nsec = static_cast<long>((time_limit_seconds - static_cast<double>(when.it_value.tv_sec)) * 1e9);
  when.it_interval.tv_nsec = 20000000;  // again and again, until it meets kernel code or the scheduler
  timer_settime(timer, 0, &when, nullptr);
}

const char* name_of_signal(int number) {
  switch (number) {
    case SIGSEGV:
      return "memory fault (SIGSEGV: no such memory, or a misaligned vector access)";
    case SIGBUS:
      return "memory fault (SIGBUS)";
    case SIGFPE:
      return "integer division by zero (SIGFPE)";
    case SIGILL:
      return "illegal instruction (SIGILL: the compiler put a trap there)";
  }
  return "signal";
}
}  // namespace

FaultGuard::FaultGuard() {
  constexpr size_t bytes = 64 << 10;
  fault_signal = 0;
  time_is_up = false;
  guarded_thread = pthread_self();
  if (!handler_stack) handler_stack = static_cast<char*>(malloc(bytes));
  stack_t stack = {};
  stack.ss_sp = handler_stack;
  stack.ss_size = bytes;
  sigaltstack(&stack, &saved_stack);
  struct sigaction action = {};
  action.sa_sigaction = &on_signal;
  // NODEFER: the handler does not return to where the signal would be unblocked.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < signal_count; ++i)
    if (i < memory_signals || signals[i] == time_signal) sigaction(signals[i], &action, &saved_actions[i]);
  start_timer();
}

FaultGuard::~FaultGuard() {
  if (have_timer) timer_delete(timer);
  for (int i = 0; i < signal_count; ++i)
    if (i < memory_signals || signals[i] == time_signal) sigaction(signals[i], &saved_actions[i], nullptr);
  sigaltstack(&saved_stack, nullptr);
}

bool take_fault(const Fiber& fiber, Block& b) {
  if (!fault_signal && !time_is_up) return false;
  if (time_is_up) {
    char seconds[32];
    snprintf(seconds, sizeof seconds, "%g", time_limit_seconds);
    const std::string waiting = where_threads_wait(b);
    b.fail("time limit: the launch took over " + std::string(seconds) + " s of CPU time; " + name_of(fiber) +
           " was running" + (fault_signal ? " in " + describe_code(fault_pc) : "") +
           (waiting.empty() ? "" : "; " + waiting));
  } else if (in_guard(fiber, fault_address)) {
    b.fail("stack overflow of " + name_of(fiber) + " in " + describe_code(fault_pc));
  } else {
    char address[32];
    snprintf(address, sizeof address, "%p", fault_address);
    b.fail(std::string(name_of_signal(fault_signal)) + " at " + address + ", " + name_of(fiber) + " in " +
           describe_code(fault_pc));
  }
  fault_signal = 0;
  return true;
}

std::string describe_code(const void* pc) {
  Dl_info info = {};
  char text[512];
  if (!dladdr(pc, &info) || !info.dli_fname) {
    snprintf(text, sizeof text, "code at %p", pc);
    return text;
  }
  const size_t offset = static_cast<size_t>(static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase));
  snprintf(text, sizeof text, "addr2line -Cfpe '%s' %#zx 2>/dev/null", info.dli_fname, offset);
  std::string line;
  if (FILE* pipe = popen(text, "r")) {
    while (fgets(text, sizeof text, pipe)) line += text;
    pclose(pipe);
  }
  while (!line.empty() && line.back() == '\n') line.pop_back();
  if (!line.empty() && line.find("??") == std::string::npos) return line;
  snprintf(text, sizeof text, "%s+%#zx", info.dli_fname, offset);
  return text;
}
}  // namespace simt
