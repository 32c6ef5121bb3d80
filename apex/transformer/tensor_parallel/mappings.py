"""What tensors go through where a tensor parallel part of a model begins and ends, forward and backward.

Each is an autograd.Function whose backward is another one, so that they are differentiable any number of times. None
writes into a gradient, or, but for `overwrite`, into a tensor that it is given. A group of one rank passes tensors on
as they are.
"""

from __future__ import annotations

import torch

from apex.transformer import _collectives as collectives
from apex.transformer.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from apex.transformer.tensor_parallel.utils import split_tensor_along_last_dim
from apex.transformer.utils import divide

_SUM = "a sum over the tensor parallel ranks"
_PARTS = "the parts of a tensor that the tensor parallel ranks share"


def _reduce(input_, overwrite=False):
    """The sum of all ranks' tensors. overwrite: it is contiguous, and becomes the sum."""
    if get_tensor_model_parallel_world_size() == 1:
        return input_
    whole = input_ if overwrite else collectives.copy(input_)
    return collectives.all_reduce(whole, get_tensor_model_parallel_group(), _SUM)


def _split_along_last_dim(input_):
    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return input_
    return split_tensor_along_last_dim(input_, ranks)[get_tensor_model_parallel_rank()].contiguous()


def _split_along_first_dim(input_):
    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return input_
    size = divide(input_.shape[0], ranks)
    return input_.narrow(0, get_tensor_model_parallel_rank() * size, size).contiguous()


def _gather_along_first_dim(input_):
    if get_tensor_model_parallel_world_size() == 1:
        return input_
    return collectives.all_gather(input_, get_tensor_model_parallel_group(), _PARTS)


def _gather_along_last_dim(input_):
    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return input_
    return torch.cat(_gather_along_first_dim(input_.unsqueeze(0)).unbind(), dim=-1)


def _reduce_scatter_along_first_dim(input_):
    ranks = get_tensor_model_parallel_world_size()
    if ranks == 1:
        return input_
    divide(input_.shape[0], ranks)
    group = get_tensor_model_parallel_group()
    return collectives.start_reduce_scatter(input_, group, _SUM).wait()


class _CopyToModelParallelRegion(torch.autograd.Function):
    """The tensor; backward, the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, input_):
        return input_

    @staticmethod
    def backward(ctx, grad_output):
        return _ReduceFromModelParallelRegion.apply(grad_output)


class _ReduceFromModelParallelRegion(torch.autograd.Function):
    """The sum of all ranks' tensors, in place if `overwrite`; backward, the gradient."""

    @staticmethod
    def forward(ctx, input_, overwrite=False):
        if overwrite:
            ctx.mark_dirty(input_)
        return _reduce(input_, overwrite)

    @staticmethod
    def backward(ctx, grad_output):
        return _CopyToModelParallelRegion.apply(grad_output), None


class _ScatterToModelParallelRegion(torch.autograd.Function):
    """This rank's part of the last dimension; backward, all ranks' parts."""

    @staticmethod
    def forward(ctx, input_):
        return _split_along_last_dim(input_)

    @staticmethod
    def backward(ctx, grad_output):
        return _GatherFromModelParallelRegion.apply(grad_output)


class _GatherFromModelParallelRegion(torch.autograd.Function):
    """All ranks' parts of the last dimension; backward, this rank's part."""

    @staticmethod
    def forward(ctx, input_):
        return _gather_along_last_dim(input_)

    @staticmethod
    def backward(ctx, grad_output):
        return _ScatterToModelParallelRegion.apply(grad_output)


class _ScatterToSequenceParallelRegion(torch.autograd.Function):
    """This rank's part of the first dimension; backward, all ranks' parts."""

    @staticmethod
    def forward(ctx, input_):
        return _split_along_first_dim(input_)

    @staticmethod
    def backward(ctx, grad_output):
        return _GatherFromSequenceParallelRegion.apply(grad_output, False)


class _GatherFromSequenceParallelRegion(torch.autograd.Function):
    """All ranks' parts of the first dimension; backward, this rank's part, of the gradient or of the sum of all."""

    @staticmethod
    def forward(ctx, input_, to_model_parallel=True):
        ctx.to_model_parallel = to_model_parallel
        return _gather_along_first_dim(input_)

    @staticmethod
    def backward(ctx, grad_output):
        if ctx.to_model_parallel:
            return _ReduceScatterToSequenceParallelRegion.apply(grad_output), None
        return _ScatterToSequenceParallelRegion.apply(grad_output), None


class _ReduceScatterToSequenceParallelRegion(torch.autograd.Function):
    """This rank's part, along the first dimension, of the sum of all ranks' tensors; backward, all ranks' parts."""

    @staticmethod
    def forward(ctx, input_):
        return _reduce_scatter_along_first_dim(input_)

    @staticmethod
    def backward(ctx, grad_output):
        return _GatherFromSequenceParallelRegion.apply(grad_output)


def copy_to_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """The tensor, which all ranks hold; its gradient is the sum of all ranks' gradients."""
    return _CopyToModelParallelRegion.apply(input_)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors, of one shape and dtype; each gets the gradient as it is."""
    return _ReduceFromModelParallelRegion.apply(input_)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """This rank's part [..., n / ranks] of [..., n], which all ranks hold. Raises ValueError if n is not divisible."""
    return _ScatterToModelParallelRegion.apply(input_)


def gather_from_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """[..., ranks * n] of all ranks' [..., n]."""
    return _GatherFromModelParallelRegion.apply(input_)


def scatter_to_sequence_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """This rank's part [n / ranks, ...] of [n, ...], which all ranks hold. Raises ValueError if n is not divisible."""
    return _ScatterToSequenceParallelRegion.apply(input_)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor, to_model_parallel: bool = True
) -> torch.Tensor:
    """[ranks * n, ...] of all ranks' [n, ...].

    to_model_parallel: True: each rank goes on with a part of the layers, so the gradients of all are summed up; False:
    all ranks do the same with it, so each takes its part of its own gradient.
    """
    return _GatherFromSequenceParallelRegion.apply(input_, to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """This rank's part [n / ranks, ...] of the sum of all ranks' [n, ...]. Raises ValueError if n is not divisible."""
    return _ReduceScatterToSequenceParallelRegion.apply(input_)


__all__ = [
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]
