// What the norms' kernels (norm.h) and their launches agree on.
#pragma once

namespace gpu {
// Columns of a block that adds partial sums up: 32 bytes of floats, which is what memory moves at least.
constexpr unsigned norm_sum_columns = 8;
// Elements a thread up to which a `rows` kernel holds its weights in registers; past it they lie in shared memory, as
// floats, after the rows.
constexpr int norm_most_kept_forward = 8, norm_most_kept_backward_centered = 16, norm_most_kept_backward = 24;
}  // namespace gpu
