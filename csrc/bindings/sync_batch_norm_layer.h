// SyncBatchNorm where a rank has its statistics to itself.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "api.h"

namespace apex {
// The whole layer of one rank, with autograd: what eager calls take instead of
// apex.parallel.optimized_sync_batchnorm_kernel's function, which does the same in Python.
APEX_TORCH_API at::Tensor sync_batch_norm_layer(const at::Tensor& input, const std::optional<at::Tensor>& z,
                                                const std::optional<at::Tensor>& weight,
                                                const std::optional<at::Tensor>& bias,
                                                const std::optional<at::Tensor>& running_mean,
                                                const std::optional<at::Tensor>& running_var,
                                                const std::optional<at::Tensor>& batches, double momentum, double eps,
                                                bool fuse_relu, bool use_batch, bool channel_last);
}  // namespace apex
