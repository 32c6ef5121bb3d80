#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace {
// A plain array: no destructor to run at thread exit, nothing to allocate when memory has run out.
thread_local char last_error[1024];
}  // namespace

namespace apex {

int32_t fail(apex_status status, const char* format, ...) {
  // Through a second buffer: an argument may be the present text.
  char text[sizeof last_error];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  __builtin_memcpy(last_error, text, sizeof text);
  return status;
}

const char* platform_name(int32_t platform) {
  switch (platform) {
    case APEX_CPU:
      return "cpu";
    case APEX_CUDA:
      return "cuda";
    case APEX_HIP:
      return "hip";
    default:
      return "unknown platform";
  }
}

}  // namespace apex

extern "C" const char* apex_last_error(void) { return last_error; }
extern "C" void apex_set_last_error(const char* text) { apex::fail(APEX_OK, "%s", text ? text : ""); }
