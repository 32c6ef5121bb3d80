"""The state of delayed scaling: scales and the magnitudes of the steps before, of one direction of a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from apex.transformer_engine.common.recipe import DelayedScaling
from apex.transformer_engine.pytorch import _casts


class Scaling:
    """Of `count` tensors: scale [count], scale_inv [count] = 1 / scale, amax_history [steps, count]; all float32.

    Row 0 of the history is that of the step that runs. scale is never written into, but replaced: what a forward pass
    saved for its backward stays as it was. `fixed` (of CUDA graphs, which know addresses) writes into it. The history
    is the beginning of memory that is there from the start: a compiled backward writes into it, and takes none that a
    graph made.
    """

    def __init__(self, count: int, length: int, device: torch.device) -> None:
        self.scale = torch.ones(count, dtype=torch.float32, device=device)
        self.scale_inv = torch.ones(count, dtype=torch.float32, device=device)
        self._rows = torch.zeros(length, count, dtype=torch.float32, device=device)
        self._length = length
        self.fixed = False

    @property
    def amax_history(self) -> torch.Tensor:
        return self._rows[: self._length]

    @amax_history.setter
    def amax_history(self, history: torch.Tensor) -> None:
        self._rows = history.clone()
        self._length = history.shape[0]

    def resize(self, length: int) -> None:
        """Keeps the newest rows, or adds rows of 0."""
        missing = length - self._rows.shape[0]
        if missing > 0:
            self._rows = torch.nn.functional.pad(self._rows, (0, 0, 0, missing))
        if length > self._length:
            self._rows[self._length : length].zero_()
        self._length = length

    def move(self, device: torch.device) -> None:
        """To another device; dtypes stay."""
        if device.type != "meta" and self.scale.device != device:
            for name in ("scale", "scale_inv", "_rows"):
                setattr(self, name, getattr(self, name).to(device))

    def replace(self, scale: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Takes new scales."""
        if self.fixed:
            self.scale.copy_(scale)
            self.scale_inv.copy_(scale_inv)
        else:
            self.scale, self.scale_inv = scale, scale_inv


def kept_versions(histories):
    """Histories are no values of any gradient: autograd need not hear that a step ended."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch.autograd._unsafe_preserve_version_counter(tuple(histories))


def update(scalings: Sequence[Scaling], maxima: Sequence[float], recipe: DelayedScaling) -> None:
    """Makes new scales of the histories, which move on by a row. maxima: the largest number of each one's format."""
    if not scalings:
        return
    with torch.no_grad(), kept_versions(scaling.amax_history for scaling in scalings):
        if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
            for scaling, largest in zip(scalings, maxima, strict=True):
                _update_by_functions(scaling, largest, recipe)
            return
        histories = [scaling.amax_history for scaling in scalings]
        scales, inverses = _casts.update_scales(
            histories,
            [scaling.scale for scaling in scalings],
            maxima,
            recipe.margin,
            recipe.amax_compute_algo,
        )
        for scaling, scale, inverse in zip(scalings, scales, inverses, strict=True):
            scaling.replace(scale, inverse)


def _update_by_functions(scaling, largest, recipe):
    """The same, by functions of the recipe."""
    history, algorithm = scaling.amax_history, recipe.amax_compute_algo
    if callable(algorithm):
        amax = algorithm(history)
    else:
        amax = history.amax(0) if algorithm == "max" else history[0].clone()
    history.copy_(history.roll(-1, 0))
    history[0].zero_()
    make = recipe.scaling_factor_compute_algo
    if make is None:
        scale = _casts.delayed_scale(amax, scaling.scale, largest, recipe.margin)
    else:
        scale = make(amax, scaling.scale, largest, recipe)
    scaling.replace(scale, torch.ones_like(scale) / scale)
