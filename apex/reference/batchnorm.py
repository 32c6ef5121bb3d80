"""Batch norm of given statistics, and the gradient of its input, in plain PyTorch."""

from apex.reference import _channels

# No functional pairs: SyncBatchNorm's autograd function has collectives between these.
PAIRS = ()


def batchnorm_forward(input, z, mean, inv_std, weight=None, shift=None, fuse_relu=False, channel_last=False):
    """(input - mean) * inv_std * weight + shift + z, and with fuse_relu its positive part; nan stays.

    input: float16, bfloat16, float32 or float64, [batch, channels, ...] in any memory format, or channel_last. z: as
    the input, or None. mean, inv_std: [channels], float32 (float64 for float64). weight, shift: [channels], any of
    these dtypes but float64, which goes with itself alone. The output has the input's dtype and memory format.
    """
    _channels.check(
        "batchnorm_forward",
        input,
        channel_last,
        statistics=(("mean", mean), ("inv_std", inv_std)),
        affine=(("weight", weight), ("bias", shift)),
        like=(("z", z),),
    )
    y = _channels.normalized(input, z, mean, inv_std, weight, shift, channel_last)
    return _channels.output(y.relu() if fuse_relu else y, input, channel_last)


def batchnorm_backward(
    grad_output,
    input,
    mean,
    inv_std,
    weight=None,
    sum_dy=None,
    sum_dy_xmu=None,
    count=None,
    channel_last=False,
):
    """The input's gradient: (dy - sum_dy / n - (x - mean) * inv_std ** 2 * sum_dy_xmu / n) * inv_std * weight.

    sum_dy, sum_dy_xmu: reduce_bn's sums over all ranks, [channels]. count: [ranks], int32 or float: n is its sum.
    Without these three the statistics count as constants (eval mode).
    """
    _channels.check(
        "batchnorm_backward",
        input,
        channel_last,
        statistics=(
            ("mean", mean), ("inv_std", inv_std), ("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu)
        ),
        affine=(("weight", weight),),
        like=(("grad_output", grad_output),),
    )  # fmt: skip
    if len({tensor is None for tensor in (sum_dy, sum_dy_xmu, count)}) > 1:
        raise ValueError("batchnorm_backward: sum_dy, sum_dy_xmu and count come together, or not at all")
    sizes, math = _channels.shape(input, channel_last), mean.dtype
    scale = inv_std if weight is None else inv_std * weight.to(math)
    grad = grad_output.to(math)
    if count is not None:
        n = count.sum().to(math).clamp_min(1)
        along = sum_dy_xmu / n * inv_std.square()
        grad = grad - (sum_dy / n).view(sizes)
        grad = grad - (input.to(math) - mean.view(sizes)) * along.view(sizes)
    return _channels.output(grad * scale.view(sizes), input, channel_last)
