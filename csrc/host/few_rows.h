// Launches of the kernels for few rows (csrc/device/few_rows.h).
#pragma once
#include "device/few_rows.h"
#include "device_limits.h"

namespace apex {
constexpr int64_t threads_at_once = 1024;  // of a multiprocessor, that all find room

struct FewRows {
  int32_t log_threads;  // of a row
  uint32_t threads;     // of a block
  int64_t blocks;
};

// What divides by n where it is multiplied with (divide_by_share).
inline uint32_t share_of(int64_t n) { return n == 1 ? 0 : uint32_t(ceil_divide(int64_t{1} << 32, n)); }

// Where all rows, of `vectors` each, are at work at once with a vector a thread: how. False: there are more, or longer.
inline bool take_few_rows(int64_t rows, int64_t vectors, const DeviceLimits& limits, FewRows* few) {
  if (vectors > gpu::few_row_threads) return false;
  few->log_threads = 0;
  while (int64_t{1} << few->log_threads < vectors) ++few->log_threads;
  const int64_t threads = int64_t{1} << few->log_threads;
  if (rows > limits.multiprocessors * threads_at_once / threads) return false;
  few->threads = threads > gpu::few_least_warp ? uint32_t(threads) : gpu::few_block_threads;
  few->threads = uint32_t(ceil_divide(few->threads, limits.block_multiple) * limits.block_multiple);
  few->blocks = ceil_divide(rows * threads, few->threads);
  return true;
}
}  // namespace apex
