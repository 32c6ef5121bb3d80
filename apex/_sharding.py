"""DTensors (FSDP2, tensor parallelism): a rank's shard, and sums over the ranks that hold the others."""

import torch


def is_sharded(tensor):
    """Whether the tensor is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def local(tensor):
    """The tensor of this rank behind a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def local_gradient(p):
    """This rank's part of p.grad, laid out over the ranks as `p` is; None if there is no gradient."""
    grad = p.grad
    if grad is None or not is_sharded(grad):
        return grad
    if grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    return grad._local_tensor


def shard_groups(p):
    """The process groups over which the elements of `p` are spread: one for each mesh dimension that shards it."""
    if not is_sharded(p):
        return ()
    mesh = p.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(p.placements) if placement.is_shard())


def combine_norm(norm, groups, maximum=False):
    """The norm of all shards from this rank's `norm`, in place: a float32 tensor of one element."""
    for group in groups:
        if maximum:
            reduce_over_ranks(norm, group, "a norm of shards", torch.distributed.ReduceOp.MAX)
        else:
            reduce_over_ranks(norm.square_(), group, "a norm of shards").sqrt_()
    return norm


def reduce_over_ranks(tensor, group, what, op=None):
    """Sums (or `op`s) a tensor over the ranks of a group, in place."""
    from apex.parallel._waiting import CALLS, waiting  # a torch without torch.distributed has none

    with waiting(what, CALLS, group=group) as wait:
        wait.run(torch.distributed.all_reduce, tensor, op=op or torch.distributed.ReduceOp.SUM, group=group)
    return tensor
