"""Parameters of layers: where they are made, and with which values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from apex.transformer_engine.pytorch._parallel import Sharing
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


class _Drawn:
    """Fills a tensor, within a tracker's fork where there is one. Goes with copies, and pickles that can name it."""

    function: Init | None = None
    tracker: Callable[[], Any] | None = None

    def __init__(self, function, tracker=None):
        self.function, self.tracker = function, tracker

    def __call__(self, values):
        if self.function is None:
            raise RuntimeError(
                "a layer that was pickled does not know how its weights were made: init_method is gone"
            )
        with torch.no_grad(), self.tracker().fork() if self.tracker is not None else contextlib.nullcontext():
            self.function(values)

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        known = self.tracker is None and "<" not in getattr(self.function, "__qualname__", "<")
        return {"function": self.function} if known else {"function": None}


class _Filled:
    """Fills a tensor with one value."""

    def __init__(self, value):
        self.value = value

    def __call__(self, values):
        with torch.no_grad():
            values.fill_(self.value)


def _add(layer, name, shape, init, dtype, device):
    """Makes a parameter, which `reset` makes anew."""
    values = torch.empty(shape, dtype=dtype, device=device)
    init(values)
    made: torch.Tensor = values
    if len(shape) == 2 and current.quantized_init and current.init_recipe is not None:
        made = Float8Tensor.of(values, current.init_recipe, current.preserve)
    layer.register_parameter(name, nn.Parameter(made))
    layer.__dict__.setdefault("_inits", {})[name] = init
    return layer._parameters[name]


def add_vector(
    layer: nn.Module, name: str, size: int, value: float, dtype: torch.dtype | None, device: torch.device
) -> nn.Parameter:
    """Adds a parameter [size], all of one value."""
    return _add(layer, name, (size,), _Filled(value), dtype, device)


def add_product(
    layer: Any,
    names: tuple[str, str],
    sizes: tuple[int, int],
    sharing: Sharing,
    init: Init | None,
    dtype: torch.dtype | None,
    device: torch.device,
    tracker: Callable[[], Any] | None = None,
) -> None:
    """Adds a weight [outputs, inputs] and, with layer.use_bias, a bias [outputs] of zeros, else None.

    names: theirs. sizes: (inputs, outputs), of which this rank makes its part. tracker: gives what has `fork()`, within
    which ranks draw different values.
    """
    split = {"column": 0, "row": 1}.get(sharing.mode or "", -1) if sharing.size > 1 else -1
    inputs, outputs = sharing.parts(sizes)
    drawn = _Drawn(init or default_init, tracker if split >= 0 else None)
    weight = _add(layer, names[0], (outputs, inputs), drawn, dtype, device)
    mark(weight, split)
    if not layer.use_bias:
        layer.register_parameter(names[1], None)
        return
    bias: Any = add_vector(layer, names[1], outputs, 0.0, weight.dtype, device)
    mark(bias, 0 if split == 0 else -1)
    bias.sequence_parallel = sharing.sequence and split != 0


def reset(layer: nn.Module) -> None:
    """Makes all parameters anew that were added above; those on the meta device on the current GPU, or on the CPU."""
    for name, init in layer.__dict__.get("_inits", {}).items():
        parameter = layer._parameters[name]
        if parameter is not None and parameter.device.type == "meta":
            made = nn.Parameter(_empty(parameter.detach(), device_of(None)), parameter.requires_grad)
            made.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in made.__dict__})
            layer.register_parameter(name, made)
        init(layer._parameters[name])


def _empty(like, device):
    if isinstance(like, Float8Tensor):
        codes, scale = (torch.empty_like(t, device=device) for t in (like._codes, like._scale_inv))
        return Float8Tensor._of_parts(
            codes.view(torch.uint8).zero_().view(codes.dtype), scale.fill_(1.0), like.dtype
        )
    return torch.empty_like(like, device=device)


def mark(parameter: nn.Parameter, split_dim: int) -> None:
    """Says of which dimension ranks hold parts, -1: of none, by Megatron-LM's attributes."""
    parameter.tensor_model_parallel = split_dim >= 0
    parameter.partition_dim, parameter.partition_stride = split_dim, 1
