"""The sums that batch norm's backward needs, in plain PyTorch."""

import torch

from apex.reference import _channels


def reduce_bn(grad_output, input, mean, inv_std, weight=None, channel_last=False, bitmask=None):
    """(sums, grad_weight, grad_bias) of this rank's elements.

    sums: [2 * channels], float32 (float64 for float64): each channel's sum of dy, then of dy * (x - mean), which the
    ranks add up. grad_weight, grad_bias: [channels] of the weight's dtype; without elements where there is none.
    Tensors as in batchnorm_forward. bitmask: groupbn_forward's; where a bit is not set dy counts as 0.
    """
    if bitmask is not None:
        _channels.check_nhwc("reduce_bn", input, channel_last)
        _channels.check_bitmask("reduce_bn", bitmask, input)
    _channels.check(
        "reduce_bn",
        input,
        channel_last,
        statistics=(("mean", mean), ("inv_std", inv_std)),
        affine=(("weight", weight),),
        like=(("grad_output", grad_output),),
    )
    over, sizes = _channels.others(input, channel_last), _channels.shape(input, channel_last)
    if bitmask is not None:
        grad_output = grad_output.masked_fill(~_channels.unpack(bitmask, input, channel_last), 0)
    dy = grad_output.to(mean.dtype)
    of_dy = dy.sum(over)
    of_dy_xmu = (dy * (input.to(mean.dtype) - mean.view(sizes))).sum(over)
    if weight is None:
        nothing = [mean.new_empty(0) for _ in range(2)]
        return torch.cat([of_dy, of_dy_xmu]), *nothing
    of_weight = (of_dy_xmu * inv_std).to(weight.dtype)
    return torch.cat([of_dy, of_dy_xmu]), of_weight, of_dy.to(weight.dtype)
