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

/* Which variant of a unit is to run. APEX_OK: a kernel or the CPU's; else what the caller answers. */
inline int32_t choose_variant(const apex_place& place, const char* unit, int32_t* variant) {
  *variant = apex_resolve(place.platform, place.device, unit);
  if (*variant == APEX_VARIANT_UNKNOWN) return APEX_ERROR_NO_VARIANT;  // the resolver left its reason
  return *variant == APEX_VARIANT_REFERENCE ? APEX_USE_REFERENCE : APEX_OK;
}

/* "cuda", "hip", "cpu": the words used in texts. */
const char* platform_name(int32_t platform);

}  // namespace apex
