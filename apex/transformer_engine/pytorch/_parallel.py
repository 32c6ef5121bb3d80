"""What tensors go through where a layer that ranks share begins and ends, over a group of the layer's own.

As the mappings of apex.transformer.tensor_parallel, which work over the one group that is set for the process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex.transformer import _collectives as collectives
from apex.transformer.utils import divide

_SUM = "a sum over the tensor parallel ranks"
_PARTS = "the parts of a sequence"


def _gathered(tensor, group):
    return collectives.all_gather(tensor, group, _PARTS)


def _scattered(tensor, group):
    divide(tensor.shape[0], dist.get_world_size(group))
    return collectives.start_reduce_scatter(tensor, group, _SUM).wait()


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, a new one."""
    return collectives.all_reduce(collectives.copy(tensor), group, _SUM)


class Copy(torch.autograd.Function):
    """The tensor; backward, the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return Sum.apply(grad, ctx.group), None


class Sum(torch.autograd.Function):
    """The sum of all ranks' tensors; backward, the gradient."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return summed(tensor, group)

    @staticmethod
    def backward(ctx, grad):
        return Copy.apply(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """All ranks' parts of the first dimension; backward, this rank's part of the sum."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx, grad):
        return Scatter.apply(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    """This rank's part of the first dimension of the sum; backward, all ranks' parts."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return _scattered(tensor, group)

    @staticmethod
    def backward(ctx, grad):
        return Gather.apply(grad, ctx.group), None


class Sharing:
    """How ranks share a layer.

    Args:
        mode: None, "column" (each has a part of the outputs) or "row" (of the inputs).
        group: the ranks, or None, which a setter brings later.
        size: how many they are, where there is no group yet.
        sequence: tensors outside of the layer are a part of the first dimension on each rank.

    Raises ValueError for another mode.
    """

    def __init__(self, mode: str | None, group: dist.ProcessGroup | None, size: int, sequence: bool) -> None:
        if mode not in (None, "row", "column"):
            raise ValueError(f"parallel_mode must be None, 'row' or 'column', not {mode!r}")
        self.mode, self.group = mode, group
        self.size = size if group is None else dist.get_world_size(group)
        self.sequence = sequence and self.size > 1

    def __deepcopy__(self, memo):
        return self  # of a group there is one

    def parts(self, sizes: tuple[int, int]) -> tuple[int, int]:
        """This rank's (inputs, outputs). Raises ValueError where ranks do not divide them."""
        inputs, outputs = sizes
        if self.mode == "column":
            outputs = divide(outputs, self.size)
        elif self.mode == "row":
            inputs = divide(inputs, self.size)
        return inputs, outputs

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the layer multiplies."""
        if self.mode != "column" or self.size == 1:
            return tensor
        return (Gather if self.sequence else Copy).apply(tensor, self._known())

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the layer gives."""
        if self.mode != "row" or self.size == 1:
            return tensor
        return (Scatter if self.sequence else Sum).apply(tensor, self._known())

    def group_of_gradients(self) -> dist.ProcessGroup | None:
        """Whose gradients of what enters add up; None: nobody's. Raises RuntimeError where the group is missing."""
        return self._known() if self.mode == "column" and self.size > 1 else None

    def _known(self):
        if self.group is None:
            raise RuntimeError(
                "the layer is shared by ranks, but knows no group: pass tp_group, or call set_tensor_parallel_group"
            )
        return self.group
