"""amp's own state dict: the loss scalers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from apex.amp._amp_state import INITIALIZE, _amp_state
from apex.amp._errors import AmpTypeError, AmpUsageError, AmpValueError, warn


def _scalers():
    if not hasattr(_amp_state, "loss_scalers"):
        raise AmpUsageError("amp has no state before amp.initialize", remedy=INITIALIZE)
    return _amp_state.loss_scalers


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}; empty while amp is disabled.

    Waits for the device. destination: a dict to put it into.
    """
    destination = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_scalers()):
        destination[f"loss_scaler{index}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Restores what `state_dict` saved; call it after amp.initialize.

    Other loss scalers than here's are warned of. Raises AmpUsageError for what is no state of amp, before anything
    changes.
    """
    scalers = _scalers()
    states = {_number_of_scaler(key): _checked_state(key, saved) for key, saved in _items(state_dict)}
    if set(states) != set(range(len(scalers))):
        why = f"num_losses={len(scalers)}" if scalers else "amp is disabled"
        taken = sorted(set(states) & set(range(len(scalers))))
        warn(
            f"amp's state dict holds {len(states)} loss scalers, but {why}: taken are {taken or 'none'}",
        )
    for number, scaler in enumerate(scalers):
        if number in states:
            scaler._loss_scale, scaler._unskipped = states[number]


_LOAD = 'amp.load_state_dict(checkpoint["amp"]), of what amp.state_dict() returned'


def _items(state_dict):
    if not isinstance(state_dict, Mapping):
        raise AmpTypeError(f"amp's state dict is no dict, but {type(state_dict).__name__}", remedy=_LOAD)
    return state_dict.items()


def _number_of_scaler(key):
    number = key.removeprefix("loss_scaler") if isinstance(key, str) and key.startswith("loss_scaler") else ""
    if not number.isdecimal():
        raise AmpUsageError(f"amp's state dict holds an unexpected key: {key!r}", remedy=_LOAD)
    return int(number)


def _checked_state(key, saved):
    """(loss scale, updates since the last overflow)"""
    try:
        scale, unskipped = float(saved["loss_scale"]), int(saved["unskipped"])
    except (KeyError, TypeError, ValueError, IndexError):
        scale, unskipped = math.nan, 0
    if not (0.0 < scale < math.inf and unskipped >= 0):
        raise AmpValueError(
            f"{key} of amp's state dict is no loss scaler's",
            wanted='{"loss_scale": a number above 0, "unskipped": a number from 0 on}',
            found=repr(saved),
            remedy=_LOAD,
        )
    return scale, unskipped
