"""Parameters of layers: where they are made, and with which values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from apex.transformer_engine.pytorch._state import current
from apex.transformer_engine.pytorch.float8_tensor import Float8Tensor

Init = Callable[[torch.Tensor], Any]


def default_init(weight: torch.Tensor) -> torch.Tensor:
    """Normal, with a standard deviation of 0.023."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


def device_of(device: torch.device | str | None) -> torch.device:
    """None: torch's default device, but the current GPU in place of the CPU where there is one."""
    if device is not None:
        return torch.device(device)
    found = torch.get_default_device()
    if found.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


class _Named:
    """A tracker's fork of one name."""

    def __init__(self, tracker, name):
        self.fork = functools.partial(tracker.fork, name)


def named(tracker: Callable[[], Any] | None, name: str | None) -> Callable[[], Any] | None:
    """What gives a tracker, whose fork() is that of `name`; None: as it is."""
    if tracker is None or name is None:
        return tracker
    return lambda: _Named(tracker(), name)


def weight(
    shape: tuple[int, int],
    init: Init | None,
    dtype: torch.dtype | None,
    device: torch.device,
    tracker: Callable[[], Any] | None = None,
    split_dim: int = -1,
) -> nn.Parameter:
    """A weight [outputs, inputs].

    tracker: gives what has `fork()`, within which ranks draw different values. split_dim: of which ranks have parts.
    """
    values = torch.empty(shape, dtype=dtype, device=device)
    with torch.no_grad(), tracker().fork() if tracker is not None else contextlib.nullcontext():
        (init or default_init)(values)
    made: torch.Tensor = values
    if current.quantized_init and current.init_recipe is not None:
        made = Float8Tensor.of(values, current.init_recipe, current.preserve)
    parameter = nn.Parameter(made)
    mark(parameter, split_dim)
    return parameter


def vector(size: int, value: float, dtype: torch.dtype | None, device: torch.device) -> nn.Parameter:
    """[size], all of one value."""
    return nn.Parameter(torch.full((size,), value, dtype=dtype, device=device))


def mark(parameter: nn.Parameter, split_dim: int) -> None:
    """Says of which dimension ranks hold parts, -1: of none, by Megatron-LM's attributes."""
    parameter.tensor_model_parallel = split_dim >= 0
    parameter.partition_dim, parameter.partition_stride = split_dim, 1
