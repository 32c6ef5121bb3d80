// What the norms' kernels (norm.h) and their launches agree on.
#pragma once

namespace gpu {
// Columns of a block that adds partial sums up.
constexpr unsigned norm_sum_columns = 32;
// Elements from one part's partial sums to the next's: whole vectors of four.
#if !defined(GPU_FN)
#define GPU_FN inline
#endif
GPU_FN constexpr long long norm_partials_pitch(long long hidden) { return (hidden + 3) / 4 * 4; }
}  // namespace gpu
