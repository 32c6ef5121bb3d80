"""Loss scalers to be used by hand. FP16_Optimizer and amp have their own, in apex.amp.scaler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def to_python_float(t: Any) -> float:
    """The number in a tensor of one element, or the first of a sequence."""
    return t.item() if hasattr(t, "item") else t[0]


class _Scaler:
    @property
    def loss_scale(self):
        return self.cur_scale

    def scale_gradient(self, module: nn.Module, grad_in, grad_out):
        """The gradients grad_in, scaled: a backward hook of a module."""
        return tuple(None if g is None else self.loss_scale * g for g in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False):
        """Backward pass of loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class LossScaler(_Scaler):
    """A scale that stays what it is, and looks for no overflow."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        return False

    @staticmethod
    def _has_inf_or_nan(x):
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""


class DynamicLossScaler(_Scaler):
    """A scale that is divided by scale_factor after an overflow (not below 1), and multiplied by it after
    scale_window updates in a row without.

        scaler.backward(loss)
        overflow = scaler.has_overflow(parameters)
        if not overflow: ...                        # divide gradients by scaler.loss_scale, step
        scaler.update_scale(overflow)
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient of these parameters holds inf or nan. Waits for each device once."""
        by_device: dict = {}
        for p in params:
            if p.grad is not None:
                finite = torch.isfinite(_values(p.grad)).all()
                by_device.setdefault(p.grad.device, []).append(finite)
        return any(not torch.stack(found).all().item() for found in by_device.values())

    @staticmethod
    def _has_inf_or_nan(x):
        return not torch.isfinite(_values(x)).all().item()

    def update_scale(self, overflow: bool) -> None:
        """Adapts the scale to whether there was an overflow."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def _values(grad):
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
