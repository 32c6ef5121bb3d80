/* Statuses and the text of the last failure: how every C function of this library says no. */
#pragma once
#include <exception>
#include <new>
#include <utility>

#include "apex.h"

namespace apex {

/* Writes this thread's text (apex_last_error) and returns `status`, so that a failure is one line. */
[[gnu::format(printf, 2, 3), gnu::cold]] int32_t fail(apex_status status, const char* format, ...);

/* Runs the body of a C function: what the C++ library throws becomes a status. Only std::exception is caught;
 * a forced unwind (a thread that ends inside a Python callback) must pass through, or it would abort. */
template <class Body>
int32_t guarded(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return fail(APEX_ERROR_MEMORY, "out of host memory");
  } catch (const std::exception& error) { return fail(APEX_ERROR_MEMORY, "the C++ library failed: %s", error.what()); }
}

/* "cuda", "hip", "cpu": the words used in texts. */
const char* platform_name(int32_t platform);

}  // namespace apex
