"""The functions of public apex's cudnn_gbn_lib. They record no gradients, as there.

Groups of ranks share statistics through torch.distributed: `peer_buffers`, addresses of the ranks' memory, are counted
and never followed. x is [N, C, H, W], float16, bfloat16, float32 or float64 in any memory format;
torch.channels_last is fastest.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex._legacy._raw import raw as _raw
from apex._plain import contiguous
from apex.parallel._batch_statistics import add_up, call, of_batch
from apex.parallel._group_batch_norm import check, gradients
from apex.parallel._neighbours import group_of

__all__ = ["backward", "forward"]


def _group(name, bn_group, rank_id, peer_buffers):
    """The process group of so many neighbouring ranks; None for one rank alone."""
    if len(peer_buffers) != bn_group:
        raise ValueError(
            f"cudnn_gbn_lib.{name}: there are {len(peer_buffers)} peer_buffers, and bn_group is {bn_group}: a buffer "
            "for each rank of the group"
        )
    group = group_of(bn_group)
    here = dist.get_rank() % bn_group if group is not None else 0
    if rank_id != here:
        raise ValueError(
            f"cudnn_gbn_lib.{name}: rank_id is {rank_id}, and this rank is number {here} of its group of {bn_group}"
        )
    return group


def _check(name, x, per_channel, statistics, dy=None):
    if x.dim() != 4:
        raise ValueError(f"cudnn_gbn_lib.{name}: x must be [N, C, H, W]; its shape is {list(x.shape)}")
    check(f"cudnn_gbn_lib.{name}", x, dy, (*per_channel, *statistics), "dy")
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    for tensor in (*per_channel, *statistics):
        if tensor.numel() != x.shape[1]:
            raise ValueError(
                f"cudnn_gbn_lib.{name}: scale, bias and statistics must have {x.shape[1]} numbers, one a channel of "
                f"x, not {list(tensor.shape)}"
            )
    for tensor in statistics:
        if tensor.dtype != math:
            raise TypeError(
                f"cudnn_gbn_lib.{name}: minibatch_mean and minibatch_inv_var must be {math}, not {tensor.dtype}"
            )


@_raw
def forward(
    x,
    scale,
    bias,
    running_mean,
    running_var,
    minibatch_mean,
    minibatch_inv_var,
    momentum,
    epsilon,
    bn_group,
    rank_id,
    peer_buffers,
):
    """Batch norm of x over `bn_group` neighbouring ranks, of which this is number `rank_id`.

    running_mean and running_var move by `momentum`; minibatch_mean and minibatch_inv_var (1 / standard deviation) are
    written, all [C]. Raises ValueError and TypeError, and RuntimeError for a group without torch.distributed.
    """
    statistics = (minibatch_mean, minibatch_inv_var)
    _check("forward", x, (scale, bias, running_mean, running_var), statistics)
    group = _group("forward", bn_group, rank_id, peer_buffers)
    x = contiguous(x, torch.channels_last)  # once, not in each of the passes
    mean, inv_std, _ = of_batch(x, False, group, epsilon, running_mean, running_var, momentum)
    y = call("groupbn_forward", x, None, mean, inv_std, scale, bias, False, False, False)[0]
    for tensor, found in zip(statistics, (mean, inv_std), strict=True):
        tensor.copy_(found.view_as(tensor))
    return y


@_raw
def backward(x, dy, scale, minibatch_mean, minibatch_inv_var, epsilon, bn_group, rank_id, peer_buffers):
    """[gradient of x, of scale, of bias]; the last two are averages over the group."""
    _check("backward", x, (scale,), (minibatch_mean, minibatch_inv_var), dy)
    group = _group("backward", bn_group, rank_id, peer_buffers)
    x, dy = (contiguous(t, torch.channels_last) for t in (x, dy))
    mean, inv_std = minibatch_mean.view(-1), minibatch_inv_var.view(-1)
    count = add_up(mean.new_full((1,), x.numel() // x.shape[1]), group)
    wants = (True, False, True, True)
    found = gradients(dy, x, None, scale, scale, mean, inv_std, count, group, False, wants)
    return [found[0], *found[2:]]
