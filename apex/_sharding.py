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
            torch.distributed.all_reduce(norm, op=torch.distributed.ReduceOp.MAX, group=group)
        else:
            norm.square_()
            torch.distributed.all_reduce(norm, group=group)
            norm.sqrt_()
    return norm
