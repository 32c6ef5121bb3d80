// The statistics by which a batch norm of one rank normalizes: its batch's, or the running ones.
#pragma once
#include "channel.h"
#include "generated/welford_mean_var.h"
#include "generated/welford_parallel.h"

namespace apex {
struct BatchStatistics {
  at::Tensor mean, inv_std, count;  // count: of the batch; undefined where running statistics are taken
};

// x: of the channels' format. With use_batch running statistics, if there are any, are brought up to date, by momentum
// or, with `batches`, as averages over so many.
inline BatchStatistics batch_statistics(const char* op, const at::Tensor& x, const Channels& channels,
                                        bool channel_last, bool use_batch, double eps,
                                        const OptionalTensor& running_mean, const OptionalTensor& running_var,
                                        double momentum, const OptionalTensor& batches) {
  BatchStatistics found;
  if (!use_batch) {
    TORCH_CHECK_VALUE(has_value(running_mean) && has_value(running_var), op,
                      ": there are no running statistics to normalize by");
    found.mean = running_mean->to(channels.math);
    found.inv_std = running_var->to(channels.math).add(eps).rsqrt();
    return found;
  }
  const c10::SymInt& each = channels.count;
  TORCH_CHECK_VALUE(x.sym_numel() != each, "Expected more than 1 value per channel when training, got input size ",
                    x.sym_sizes());
  const at::Tensor statistics = dispatcher_op<WelfordMeanVar>().call(x, channel_last), rows = statistics.unsqueeze(0);
  std::tie(found.mean, std::ignore, found.inv_std, found.count) = dispatcher_op<WelfordParallel>().call(
      rows.narrow_symint(1, 0, each), rows.narrow_symint(1, each, each), statistics.narrow_symint(0, 2 * each, 1), eps,
      running_mean, running_var, momentum, batches);
  return found;
}
}  // namespace apex
