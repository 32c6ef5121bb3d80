"""The functions of public apex's syncbn. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
_ops = torch.ops.apex

__all__ = [
    "batchnorm_backward",
    "batchnorm_backward_c_last",
    "batchnorm_forward",
    "batchnorm_forward_c_last",
    "reduce_bn",
    "reduce_bn_c_last",
    "relu_bw_c_last",
    "welford_mean_var",
    "welford_mean_var_c_last",
    "welford_parallel",
]


def _split(statistics):
    channels = statistics.numel() // 2
    return [statistics[:channels], statistics[channels : 2 * channels]]


@_raw
def welford_mean_var(input):
    """[mean, biased variance] of each channel of [batch, channels, ...], float32 (float64 for float64)."""
    return _split(_ops.welford_mean_var(input))


@_raw
def welford_mean_var_c_last(input):
    """As welford_mean_var, of [..., channels]."""
    return _split(_ops.welford_mean_var(input, True))


@_raw
def welford_parallel(mean_feature_nodes, var_biased, numel, eps):
    """[mean, unbiased variance, 1 / standard deviation] over ranks; the two are [ranks, channels], numel [ranks]."""
    dtype = mean_feature_nodes.dtype
    if dtype in (torch.float16, torch.bfloat16):
        found = welford_parallel(mean_feature_nodes.float(), var_biased.float(), numel, eps)
        return [tensor.to(dtype) for tensor in found]
    return list(_ops.welford_parallel(mean_feature_nodes, var_biased, numel.int(), eps)[:3])


@_raw
def batchnorm_forward(input, mean, inv_std, weight, shift):
    """(input - mean) * inv_std * weight + shift, in the input's dtype; weight and shift may be None."""
    return _ops.batchnorm_forward(input, None, mean, inv_std, weight, shift)


@_raw
def batchnorm_forward_c_last(input, z, mean, inv_std, weight, shift, fuse_relu):
    """As batchnorm_forward, of [..., channels]; z (or None) is added, then comes the ReLU."""
    return _ops.batchnorm_forward(input, z, mean, inv_std, weight, shift, fuse_relu, True)


def _reduce(grad_output, input, mean, inv_std, weight, channel_last):
    sums, grad_weight, grad_bias = _ops.reduce_bn(grad_output, input, mean, inv_std, weight, channel_last)
    return [*_split(sums), grad_weight, grad_bias]


@_raw
def reduce_bn(grad_output, input, mean, inv_std, weight):
    """[sum of dy, of dy * (x - mean), grad_weight, grad_bias]; the last two without elements if there is no weight."""
    return _reduce(grad_output, input, mean, inv_std, weight, False)


@_raw
def reduce_bn_c_last(grad_output, input, mean, inv_std, weight):
    """As reduce_bn, of [..., channels]."""
    return _reduce(grad_output, input, mean, inv_std, weight, True)


@_raw
def batchnorm_backward(grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count):
    """The gradient of the input; count: [ranks], int32, elements of a channel on each."""
    return _ops.batchnorm_backward(
        grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count.int(), False
    )


@_raw
def batchnorm_backward_c_last(grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count):
    """As batchnorm_backward, of [..., channels]."""
    return _ops.batchnorm_backward(
        grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count.int(), True
    )


@_raw
def relu_bw_c_last(grad_output, input, z, mean, inv_std, weight, shift):
    """grad_output where batchnorm_forward_c_last before its ReLU is positive, else 0."""
    return _ops.relu_bw(grad_output, input, z, mean, inv_std, weight, shift, True)
