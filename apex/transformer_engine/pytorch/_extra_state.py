"""Scales and histories of a layer as bytes of a state dict; reads those of the public engine, too.

Nothing here runs code out of a checkpoint: archives of torch are read with weights_only, and pickles by a reader that
knows the names of tensors alone, and makes empty objects in place of the public engine's.
"""

from __future__ import annotations

import collections
import io
import pickle
import warnings
from typing import Any

import torch
import torch._utils

_PARTS = (("fwd", "forward"), ("bwd", "backward"))
_NAMES = ("scale", "scale_inv", "amax_history")
# That there is none. Not empty: torch.save writes empty bytes by a name that torch.load(weights_only=True) refuses.
NONE = b"-"


def write(state: Any) -> bytes:
    """A torch archive of a LayerState; NONE where neither FP8 nor calibration by delayed scaling ran."""
    if not state.used:
        return NONE
    found: dict[str, Any] = {
        f"{name}_{short}": getattr(getattr(state, part), name).detach().cpu().clone()
        for short, part in _PARTS
        for name in _NAMES
    }
    found["extra_fp8_variables"] = {"num_gemms": state.forward.scale.numel() // 3, "pending": state.pending}
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def read(value: Any, state: Any) -> None:
    """Takes what `write` gave, or get_extra_state of the public engine (1.x, 2.x): None, bytes, uint8 tensors, files.

    Raises ValueError for tensors of another layer, pickle.UnpicklingError for what is no such state.
    """
    found = _opened(value)
    if not found:
        return
    if isinstance(found, list):
        warnings.warn("an FP8 state of the old list format: save the checkpoint again", stacklevel=3)
        found = _of_list(found)
    for short, part in _PARTS:
        if f"scale_{short}" in found:
            _take(getattr(state, part), found, short)
    state.used, state.recipe = True, None
    if found.get("extra_fp8_variables", {}).get("pending"):
        state.wait()
    else:
        state.rest()


def _take(scaling, found, short):
    history, scale = found[f"amax_history_{short}"], found[f"scale_{short}"]
    if scale.shape != scaling.scale.shape or history.shape[1:] != scale.shape:
        raise ValueError(
            f"the FP8 state in the checkpoint has scale_{short} of shape {list(scale.shape)} and amax_history_{short} "
            f"{list(history.shape)}, the layer {list(scaling.scale.shape)}"
        )
    inverse = found.get(f"scale_inv_{short}")
    device = scaling.scale.device
    inverse = 1.0 / scale if inverse is None else inverse
    scaling.replace(scale.to(device, torch.float32), inverse.to(device, torch.float32))
    scaling.amax_history = history.to(device, torch.float32)


def _of_list(found):
    """[scale, history, scale, history] of the forward and the backward pass: input and weight, gradient."""
    named = {}
    for short, each, wanted, (scale, history) in (("fwd", 2, 3, found[:2]), ("bwd", 1, 2, found[2:4])):
        gemms = scale.numel() // each
        columns = [wanted * gemm + i for gemm in range(gemms) for i in range(each)]
        wide = torch.ones(wanted * gemms, dtype=torch.float32, device="cpu")
        wide[columns] = scale.to("cpu", torch.float32)
        rows = torch.zeros(history.shape[0], wanted * gemms, dtype=torch.float32, device="cpu")
        rows[:, columns] = history.to("cpu", torch.float32)
        named |= {f"scale_{short}": wide, f"amax_history_{short}": rows}
    return named


def _opened(value):
    if value is None or isinstance(value, (dict, list)):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy().tobytes()
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if not isinstance(value, (bytes, bytearray)):
        raise TypeError(f"an FP8 state is bytes, a uint8 tensor or a file, not {type(value).__name__}")
    if not value or value == NONE:
        return None
    if value[:2] == b"PK":
        return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
    return _Reader(io.BytesIO(value)).load()


class _Empty:
    """In place of an object of the public engine, a recipe for one: nothing of it is needed."""

    def __new__(cls, *_: Any, **__: Any) -> _Empty:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _storage(content):
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _bytes(text, encoding):
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(
            f"the FP8 state of a checkpoint has bytes written as {encoding!r}, not latin1"
        )
    return text.encode(encoding)


class _Reader(pickle.Unpickler):
    _KNOWN = {
        ("_codecs", "encode"): _bytes,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch.storage", "_load_from_bytes"): _storage,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._KNOWN:
            return self._KNOWN[module, name]
        if module.partition(".")[0] == "transformer_engine":
            return _Empty
        raise pickle.UnpicklingError(
            f"the FP8 state of a checkpoint names {module}.{name}, which is not read: it holds more than an FP8 state"
        )
