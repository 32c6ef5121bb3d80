// What the fake drivers share: a log of calls, and failures on demand.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#if defined(_WIN32)
#define FAKE extern "C" __declspec(dllexport)
#else
#define FAKE extern "C" __attribute__((visibility("default")))
#endif

namespace fake {

inline std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
inline std::string log;
inline std::map<std::string, int> failures;  // call -> code, until cleared

[[gnu::format(printf, 1, 2)]] inline void note(const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  Lock lock(mutex);
  log += line;
  log += '\n';
}

inline int failure(const char* call) {
  Lock lock(mutex);
  const auto found = failures.find(call);
  return found == failures.end() ? 0 : found->second;
}

// A fake code object is text: "arch sm_90\nkernel NAME [STATIC SHARED BYTES]\n...".
inline bool has_line(const char* image, const std::string& start) {
  const std::string text = std::string("\n") + image;
  const auto at = text.find("\n" + start);
  if (at == std::string::npos) return false;
  const char after = text[at + 1 + start.size()];
  return after == '\n' || after == ' ' || after == '\0';
}

inline int static_shared(const char* image, const std::string& kernel) {
  const std::string text = std::string("\n") + image;
  const std::string start = "\nkernel " + kernel + " ";
  const auto at = text.find(start);
  return at == std::string::npos ? 0 : atoi(text.c_str() + at + start.size());
}

}  // namespace fake

FAKE const char* fake_log() {
  static std::string copy;
  fake::Lock lock(fake::mutex);
  copy = fake::log;
  return copy.c_str();
}
FAKE void fake_clear_log() {
  fake::Lock lock(fake::mutex);
  fake::log.clear();
}
// Every later call of this name answers `code`; 0 ends that.
FAKE void fake_fail(const char* call, int code) {
  fake::Lock lock(fake::mutex);
  if (code) fake::failures[call] = code;
  else fake::failures.erase(call);
}
