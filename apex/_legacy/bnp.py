"""The functions of public apex's bnp. They record no gradients, as there.

Groups of ranks share statistics through torch.distributed, so the pointers that public apex hands around (my_data,
pair_data and so on) are taken and never followed, as are ret_cta, magic, occupancies and grid sizes: the library finds
launch configurations by itself.
"""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex.parallel._batch_statistics import add_up, call, of_batch, of_running
from apex.parallel._group_batch_norm import check, gradients, is_channel_last
from apex.parallel._neighbours import group_of

__all__ = [
    "bn_addrelu_bwd_nhwc",
    "bn_addrelu_bwd_nhwc_occupancy",
    "bn_addrelu_fwd_eval_nhwc",
    "bn_addrelu_fwd_nhwc",
    "bn_addrelu_fwd_nhwc_occupancy",
    "bn_bwd_nhwc",
    "bn_bwd_nhwc_occupancy",
    "bn_fwd_eval_nhwc",
    "bn_fwd_nhwc",
    "bn_fwd_nhwc_occupancy",
    "close_remote_data",
    "get_buffer_size",
    "get_data_ptr",
    "get_remote_data_ptr",
]


# ---- memory of other ranks: nothing is shared that way -------------------------------------------------------


def get_buffer_size(bn_sync_steps):
    """Bytes of the buffer that a rank makes for its group: as many as there are steps, since nothing is put in it."""
    return int(bn_sync_steps)


def get_data_ptr(data):
    """The address of a tensor."""
    return data.data_ptr()


def get_remote_data_ptr(handle, offset):
    """What stands for another rank's buffer: None, for no function here follows it."""
    return None


def close_remote_data(handle):
    """Nothing was opened, so nothing is closed."""


# ---- launch configurations: the library's own -----------------------------------------------------------------


def bn_fwd_nhwc_occupancy():
    """Blocks a multiprocessor, for callers that compute grid sizes from it: 2, the most that public apex has."""
    return 2


bn_bwd_nhwc_occupancy = bn_addrelu_fwd_nhwc_occupancy = bn_addrelu_bwd_nhwc_occupancy = bn_fwd_nhwc_occupancy


# ---- forward ----------------------------------------------------------------------------------------------------


def _train(name, x, z, scale, bias, running, minibatch, momentum, epsilon, relu, bn_group, make_bitmask):
    last = is_channel_last(name, x, scale.numel())
    check(name, x, z, (scale, bias, *running, *minibatch))
    for tensor in minibatch:
        if tensor.shape != scale.shape:
            raise ValueError(
                f"{name}: minibatch_mean and minibatch_inv_var must be {list(scale.shape)}, not {list(tensor.shape)}"
            )
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    for tensor in minibatch:
        if tensor.dtype != math:
            raise TypeError(
                f"{name}: minibatch_mean and minibatch_inv_var must be {math}, not {tensor.dtype}"
            )
    mean, inv_std, _ = of_batch(x, last, group_of(bn_group), epsilon, *running, momentum)
    y, bitmask = call("groupbn_forward", x, z, mean, inv_std, scale, bias, relu, make_bitmask, last)
    for tensor, found in zip(minibatch, (mean, inv_std), strict=True):
        tensor.copy_(found)
    return y, bitmask


def _eval(name, x, z, scale, bias, running_mean, running_var, epsilon, relu):
    last = is_channel_last(name, x, scale.numel())
    mean, inv_std = of_running(running_mean, running_var, epsilon, x.dtype)
    return call("groupbn_forward", x, z, mean, inv_std, scale, bias, relu, False, last)[0]


@_raw
def bn_fwd_nhwc(
    x,
    scale,
    bias,
    running_mean,
    running_inv_var,
    minibatch_mean,
    minibatch_inv_var,
    ret_cta,
    momentum,
    epsilon,
    fuse_relu,
    my_data,
    pair_data,
    pair_data2,
    pair_data3,
    bn_group,
    magic_tensor,
    occupancy,
    grid_dim_x,
    coop,
):
    """Batch norm of x, [N, H, W, C] or [N, C, H, W] in torch.channels_last, and the ReLU of it if fuse_relu.

    running_mean and running_inv_var (a variance, in spite of its name) move by `momentum`; minibatch_mean and
    minibatch_inv_var (1 / standard deviation) are written, all [C]. bn_group: neighbouring ranks that share
    statistics. Raises ValueError and TypeError.
    """
    running, minibatch = (running_mean, running_inv_var), (minibatch_mean, minibatch_inv_var)
    return _train(
        "bn_fwd_nhwc", x, None, scale, bias, running, minibatch, momentum, epsilon, fuse_relu, bn_group, False
    )[0]


@_raw
def bn_fwd_eval_nhwc(
    x, scale, bias, running_mean, running_inv_var, ret_cta, bn_group, momentum, epsilon, fuse_relu
):
    """As bn_fwd_nhwc, by the running statistics."""
    return _eval("bn_fwd_eval_nhwc", x, None, scale, bias, running_mean, running_inv_var, epsilon, fuse_relu)


@_raw
def bn_addrelu_fwd_nhwc(
    x,
    z,
    scale,
    bias,
    running_mean,
    running_inv_var,
    minibatch_mean,
    minibatch_inv_var,
    bitmask,
    ret_cta,
    momentum,
    epsilon,
    my_data,
    pair_data,
    pair_data2,
    pair_data3,
    bn_group,
    magic_tensor,
    occupancy,
    grid_dim_x,
    coop,
):
    """The ReLU of bn_fwd_nhwc and z. bitmask: any integers, a bit or more for each element; it is written."""
    running, minibatch = (running_mean, running_inv_var), (minibatch_mean, minibatch_inv_var)
    into = _bytes_of("bn_addrelu_fwd_nhwc", bitmask, x)
    y, found = _train(
        "bn_addrelu_fwd_nhwc", x, z, scale, bias, running, minibatch, momentum, epsilon, True, bn_group, True
    )
    into.copy_(found)
    return y


@_raw
def bn_addrelu_fwd_eval_nhwc(
    x, z, scale, bias, running_mean, running_inv_var, ret_cta, bn_group, momentum, epsilon
):
    """As bn_addrelu_fwd_nhwc, by the running statistics."""
    return _eval("bn_addrelu_fwd_eval_nhwc", x, z, scale, bias, running_mean, running_inv_var, epsilon, True)


def _bytes_of(name, bitmask, x):
    """The part of a caller's mask that holds a bit for each element of x."""
    wanted = (x.numel() + 7) // 8
    if bitmask.is_floating_point() or bitmask.is_complex():
        raise TypeError(f"{name}: bitmask must be of integers, not {bitmask.dtype}")
    if bitmask.device != x.device:
        raise ValueError(f"{name}: bitmask is on {bitmask.device}, x on {x.device}")
    if not bitmask.is_contiguous() or bitmask.numel() * bitmask.element_size() < wanted:
        raise ValueError(
            f"{name}: bitmask must be contiguous and hold {wanted} bytes, a bit for each element of x; it has "
            f"{bitmask.numel() * bitmask.element_size()}"
        )
    return bitmask.view(-1).view(torch.uint8)[:wanted]


# ---- backward -----------------------------------------------------------------------------------------------------


def _backward(name, dy, x, bitmask, scale, bias, mean, inv_std, bn_group, of_z):
    group = group_of(bn_group)
    last = is_channel_last(name, x, scale.numel())
    count = add_up(mean.new_full((1,), x.numel() // scale.numel()), group)
    wants = (True, of_z, True, True)
    return list(gradients(dy, x, bitmask, scale, bias, mean, inv_std, count, group, last, wants))


@_raw
def bn_bwd_nhwc(
    x,
    dy,
    scale,
    bias,
    running_mean,
    running_inv_var,
    minibatch_mean,
    minibatch_inv_var,
    ret_cta,
    momentum,
    epsilon,
    fuse_relu,
    my_data,
    pair_data,
    pair_data2,
    pair_data3,
    bn_group,
    magic_tensor,
    occupancy,
    grid_dim_x,
    coop,
):
    """[dx, grad_scale, grad_bias] of bn_fwd_nhwc; the last two are averages over the group."""
    if fuse_relu:
        last = is_channel_last("bn_bwd_nhwc", x, scale.numel())
        dy = call("relu_bw", dy, x, None, minibatch_mean, minibatch_inv_var, scale, bias, last)
    found = _backward(
        "bn_bwd_nhwc", dy, x, None, scale, bias, minibatch_mean, minibatch_inv_var, bn_group, False
    )
    return [found[0], *found[2:]]


@_raw
def bn_addrelu_bwd_nhwc(
    x,
    dy,
    scale,
    bias,
    running_mean,
    running_inv_var,
    minibatch_mean,
    minibatch_inv_var,
    bitmask,
    ret_cta,
    momentum,
    epsilon,
    my_data,
    pair_data,
    pair_data2,
    pair_data3,
    bn_group,
    magic_tensor,
    occupancy,
    grid_dim_x,
    coop,
):
    """[dx, dz, grad_scale, grad_bias] of bn_addrelu_fwd_nhwc, by the mask that it wrote."""
    mask = _bytes_of("bn_addrelu_bwd_nhwc", bitmask, x)
    return _backward(
        "bn_addrelu_bwd_nhwc", dy, x, mask, scale, bias, minibatch_mean, minibatch_inv_var, bn_group, True
    )
