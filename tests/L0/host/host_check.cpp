// Internal headers of the host library under test: linked with its objects, called from Python.
#include <stdexcept>
#include <vector>

#include "host/cpu_level.h"
#include "host/parallel.h"
#include "host/status.h"
#include "host/workspace.h"

extern "C" {

// Sums begin..end-1 by parallel_for; also how many pieces there were.
APEX_EXPORT int64_t check_parallel_sum(int64_t begin, int64_t end, int64_t grain, int64_t* pieces) {
  int64_t sum = 0;
  *pieces = 0;
  apex::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) sum += i;
    ++*pieces;
  });
  return sum;
}

APEX_EXPORT int32_t check_guarded(int32_t kind) {
  return apex::guarded([&]() -> int32_t {
    if (kind == 1) throw std::bad_alloc();
    if (kind == 2) throw std::runtime_error("why");
    if (kind == 3) std::vector<char>().reserve(static_cast<size_t>(-1) / 2 + 1);
    return APEX_OK;
  });
}

APEX_EXPORT int32_t check_take_workspace(const apex_place* place, const apex_workspace* workspace, int64_t bytes,
                                         int64_t count, uint8_t** memory, uint32_t** counters) {
  return apex::take_workspace(*place, workspace, bytes, count, memory, counters);
}

APEX_EXPORT int32_t check_machine_level() { return apex::machine_cpu_level(); }
}
