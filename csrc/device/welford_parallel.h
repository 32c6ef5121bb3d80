// Statistics of several ranks as one, in the order of the ranks.
#pragma once
#include "batchnorm_arguments.h"
#include "vectors.h"
#include "welford.h"

namespace gpu {
template <class Math> GPU_FN void update_running(u8* running, i32 type, i64 channel, Math momentum, Math value) {
  if (!running) return;
  Math x[1];
  load_values(x, running, type, channel);
  x[0] = fma(momentum, value, (Math(1) - momentum) * x[0]);
  store_values(running, type, channel, x);
}

// One channel; also what the CPU variant runs.
template <class Math> GPU_FN void welford_parallel(const WelfordParallel& a, i64 channel) {
  const Math* const mean = reinterpret_cast<const Math*>(a.mean) + channel;
  const Math* const var = reinterpret_cast<const Math*>(a.var) + channel;
  Moments<Math> all{};
  for (i64 rank = 0; rank < a.ranks; ++rank) {
    const i64 at = rank * a.count_stride;
    const Math count =
        a.count_is_int ? (Math) reinterpret_cast<const i32*>(a.count)[at] : reinterpret_cast<const Math*>(a.count)[at];
    all.merge(Moments<Math>::of(count, mean[rank * a.mean_stride], var[rank * a.var_stride] * count));
  }
  // Of a single element there is no unbiased variance: 0. Of none, the running statistics stay.
  const Math unbiased = all.m2 / maximum(all.count - Math(1), Math(1));
  reinterpret_cast<Math*>(a.out_mean)[channel] = all.mean;
  reinterpret_cast<Math*>(a.out_var)[channel] = unbiased;
  reinterpret_cast<Math*>(a.out_inv_std)[channel] =
      a.ranks == 1 ? inverse_deviation(*var, Math(1), (Math)a.eps)
                   : inverse_deviation(all.m2, maximum(all.count, Math(1)), (Math)a.eps);
  if (channel == 0) *reinterpret_cast<Math*>(a.out_count) = all.count;
  if (all.count == Math(0)) return;
  const Math momentum = a.batches ? Math(1) / (Math)*a.batches : (Math)a.momentum;
  update_running(a.running_mean, a.running_type, channel, momentum, all.mean);
  update_running(a.running_var, a.running_type, channel, momentum, unbiased);
}
}  // namespace gpu
