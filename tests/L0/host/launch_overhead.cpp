// Times apex_launch against the driver's own launch of the same kernel: both queue empty kernels.
#include <time.h>

#include <algorithm>

#include "host/apex.h"

namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

}  // namespace

using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                       void**);

// Microseconds per launch, the best of `rounds`: [0] the driver's, [1] apex_launch. Rounds of the two alternate.
// `wait` empties the queue between rounds, so that neither waits for a full one.
extern "C" __attribute__((visibility("default"))) int32_t time_launches(decltype(&apex_launch) apex, Launch driver,
                                                                        int (*wait)(), void* function,
                                                                        const apex_place* place, apex_kernel* kernel,
                                                                        void** parameters, int32_t rounds,
                                                                        int32_t launches, double* best) {
  best[0] = best[1] = 1e9;
  for (int32_t round = 0; round < rounds; ++round) {
    double begin = now();
    for (int32_t i = 0; i < launches; ++i)
      if (const int code = driver(function, 1, 1, 1, 32, 1, 1, 0, place->stream, parameters, nullptr)) return code;
    best[0] = std::min(best[0], (now() - begin) / launches);
    wait();
    begin = now();
    for (int32_t i = 0; i < launches; ++i)
      if (const int32_t status = apex(place, kernel, {1, 1, 1}, {32, 1, 1}, 0, parameters)) return status;
    best[1] = std::min(best[1], (now() - begin) / launches);
    wait();
  }
  return 0;
}
