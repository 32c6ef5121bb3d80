"""What the parts of amp know in common: one object a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from apex.amp._errors import AmpTypeError, AmpUsageError, warn

INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")'


class AmpState:
    """amp's state in this process.

    opt_properties (frontend.Properties) and loss_scalers (list of scaler.LossScaler) appear with amp.initialize.

    Attributes:
        hard_override: questionable options warn and go on.
        allow_incoming_model_not_fp32: amp.initialize takes models that hold half precision already.
        verbosity: 0 silent, 1 informs, 2 also prints each cast of a patched function.
        cast_devices: device types whose tensors patched functions cast; None: every type.
        scaled_passes: how many times a scaled loss was left, by any optimizers.
        masters: model parameter -> its float32 master weight.
        handle: of the functions that were patched last (handle.AmpHandle), or no_handle.
        no_handle: a handle.NoOpHandle, the same for all. No property: every call of a function that amp casts asks.
    """

    loss_scalers: list
    handle: Any = None  # handle.py, which needs this module, puts no_handle here
    no_handle: Any = None

    def __init__(self):
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.min_loss_scale = None
        self.max_loss_scale = 2.0**24
        self.cast_devices = None
        self.scaled_passes = 0
        self.masters = WeakIdKeyDictionary()


_amp_state = AmpState()


def warn_or_err(msg, remedy=None):
    """Raises AmpUsageError; warns only, if `_amp_state.hard_override` is set."""
    if not _amp_state.hard_override:
        raise AmpUsageError(msg, remedy=remedy)
    warn(f"{msg}\n  remedy:    {remedy}" if remedy else msg)


def maybe_print(msg, rank0=False):
    """Prints unless verbosity is 0; with rank0 only on the first rank of a distributed run."""
    if _amp_state.verbosity <= 0:
        return
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (rank0 and distributed and torch.distributed.get_rank() != 0):
        print(msg)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yields what `optimizer` updates: float32 master weights where a model's parameters are half precision.

    Their gradients are unscaled once `scale_loss` was left; clip these, not the model's. Raises AmpTypeError for
    what is no optimizer.
    """
    if not hasattr(optimizer, "param_groups"):
        raise AmpTypeError(
            f"amp.master_params takes one optimizer, not {type(optimizer).__name__}",
            remedy="clip_grad_norm_(amp.master_params(optimizer), 1.0) for each optimizer",
        )
    for group in optimizer.param_groups:
        yield from group["params"]
