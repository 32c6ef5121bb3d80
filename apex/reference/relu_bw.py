"""The gradient through batch norm's fused ReLU, in plain PyTorch."""

from apex.reference import _channels


def relu_bw(grad_output, input, z, mean, inv_std, weight=None, shift=None, channel_last=False):
    """grad_output where batchnorm_forward (before its ReLU) is positive, else 0. Tensors as there."""
    _channels.check(
        "relu_bw",
        input,
        channel_last,
        statistics=(("mean", mean), ("inv_std", inv_std)),
        affine=(("weight", weight), ("bias", shift)),
        like=(("z", z), ("grad_output", grad_output)),
    )
    y = _channels.normalized(input, z, mean, inv_std, weight, shift, channel_last)
    return _channels.output(grad_output.masked_fill(y <= 0, 0), input, channel_last)
