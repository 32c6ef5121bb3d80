/* The caller's threads: this library has none of its own, so that a forked child works. */
#pragma once
#include <cstdint>
#include <type_traits>

#include "apex.h"

namespace apex {

/* The callback in force. Null: run inline, as a forked child does, to which no thread came along. */
apex_parallel_for parallel_for_callback();

/* Calls body(first, last) over [begin, end), in pieces of about `grain` or more, on the caller's threads if
 * it lent any (apex_set_parallel_for), else once, inline. The body must not throw. */
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  if (begin >= end) return;
  const apex_parallel_for callback = parallel_for_callback();
  if (!callback || end - begin <= grain) {
    body(begin, end);
    return;
  }
  callback(
      begin, end, grain < 1 ? 1 : grain,
      [](void* context, int64_t first, int64_t last) { (*static_cast<Plain*>(context))(first, last); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace apex
