// Batch norm of NHWC tensors with an addition and a ReLU in the same pass, whose mask is kept as bits.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "api.h"

namespace apex {
// The whole layer of one rank, with autograd: what eager calls take instead of apex.parallel._group_batch_norm's
// function, which does the same in Python. Returns the output, the mean and 1 / standard deviation.
APEX_TORCH_API std::tuple<at::Tensor, at::Tensor, at::Tensor> group_batch_norm_layer(
    const at::Tensor& input, const std::optional<at::Tensor>& z, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, const std::optional<at::Tensor>& batches, double momentum, double eps,
    bool fuse_relu, bool use_batch, bool channel_last);
}  // namespace apex
