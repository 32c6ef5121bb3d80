"""What functions of the legacy modules check by themselves: tensors that they write to, or compute from by torch."""

from __future__ import annotations

import torch


def written(function, **pairs):
    """Raises TypeError or ValueError unless each tensor that is written, name=(tensor, like), is as the other is.

    torch would broadcast and convert, and the caller would read something else than what was computed.
    """
    for name, (tensor, like) in pairs.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != like.dtype:
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"{function}: {name} must be a tensor of {like.dtype}, not {found}")
        if tensor.shape != like.shape or tensor.device != like.device:
            raise ValueError(
                f"{function}: {name} must be {list(like.shape)} on {like.device}, not {list(tensor.shape)} on "
                f"{tensor.device}"
            )


def floating(function, **tensors):
    """Raises TypeError unless all are tensors of real floating-point numbers."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"{function}: {name} must be a floating-point tensor, not {found}")


def given(function, **tensors):
    """Raises TypeError for None in place of a tensor that the op of the same work can do without, and this cannot."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{function}: {name} must be a tensor, not None")
