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
// Vectors of 8 halves that a thread of a `held` kernel has of a row.
constexpr int norm_held_vectors = 2;
}  // namespace gpu

// Shapes of the `teams` kernels (norm_teams.h), V(elements of a row, vectors a thread, rows that a block works on at
// once, rows of each of them in shared memory).
#define NORM_FORWARD_TEAMS(V) V(1024, 1, 8, 5) V(2048, 2, 8, 5) V(4096, 2, 4, 5) V(8192, 2, 2, 5) V(12288, 3, 2, 3)
#define NORM_BACKWARD_TEAMS(V) V(1024, 1, 4, 6) V(2048, 2, 4, 6) V(4096, 2, 2, 6) V(8192, 2, 1, 6)
