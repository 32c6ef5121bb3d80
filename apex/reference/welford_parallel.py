"""Statistics of several ranks as one, in plain PyTorch."""

import torch

from apex.reference._multi_tensor import store


def welford_parallel(
    mean,
    var_biased,
    numel,
    eps,
    running_mean=None,
    running_var=None,
    momentum=0.0,
    num_batches_tracked=None,
):
    """(mean, unbiased variance, 1 / sqrt(biased variance + eps), [count]) over all ranks.

    mean, var_biased: [ranks, channels], float32 or float64. numel: [ranks], int32 or their dtype: how many elements
    a channel has on each rank; they may differ, and be 0. Running statistics, if given, move by `momentum` towards the
    new ones, or by 1 / num_batches_tracked; of no element at all they stay, and one element has the variance 0.
    Raises ValueError and TypeError.
    """
    op = "welford_parallel"
    if mean.dim() != 2 or mean.shape != var_biased.shape:
        raise ValueError(
            f"{op}: mean and var_biased must both be [ranks, channels], not {list(mean.shape)} and "
            f"{list(var_biased.shape)}"
        )
    if tuple(numel.shape) != (mean.shape[0],):
        raise ValueError(
            f"{op}: numel must hold one count for each of {mean.shape[0]} ranks; its shape is "
            f"{list(numel.shape)}"
        )
    if mean.dtype not in (torch.float32, torch.float64) or var_biased.dtype != mean.dtype:
        raise TypeError(f"{op}: mean and var_biased must both be float32 or both float64, not {mean.dtype}")
    if numel.dtype not in (torch.int32, mean.dtype):
        raise TypeError(f"{op}: numel must be int32 or {mean.dtype}, not {numel.dtype}")
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{op}: running_mean and running_var come together, or not at all")
    for name, running in (("running_mean", running_mean), ("running_var", running_var)):
        if running is None:
            continue
        if tuple(running.shape) != (mean.shape[1],):
            raise ValueError(
                f"{op}: {name} has shape {list(running.shape)} but the input has {mean.shape[1]} channels"
            )
        if (running.dtype == torch.float64) != (mean.dtype == torch.float64):
            raise TypeError(f"{op}: running statistics are float64 beside float64 alone, not {running.dtype}")

    counts = numel.to(mean.dtype).unsqueeze(1)
    total = counts.sum()
    some = total.clamp_min(1)
    # Deviations from one rank's mean, so that a large mean costs no digits.
    start = mean.gather(0, counts.argmax(0, keepdim=True).expand(1, mean.shape[1]))[0]
    all_mean = start + ((mean - start) * counts).sum(0) / some
    m2 = ((var_biased + (mean - all_mean).square()) * counts).sum(0)
    unbiased = m2 / (total - 1).clamp_min(1)
    if running_mean is not None:
        if num_batches_tracked is not None:
            momentum = 1.0 / num_batches_tracked.to(mean.dtype)
        for running, new in ((running_mean, all_mean), (running_var, unbiased)):
            old = running.to(mean.dtype)
            moved = (1.0 - momentum) * old + momentum * new
            store(running, torch.where(total > 0, moved, old))
    return all_mean, unbiased, torch.rsqrt(m2 / some + eps), total.view(1).clone()
