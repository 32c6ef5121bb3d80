"""The state of delayed scaling: scales and the magnitudes of the steps before, of one direction of a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from apex._functional import is_traced
from apex.transformer_engine.common.recipe import DelayedScaling
from apex.transformer_engine.pytorch import _casts, _history


class Scaling:
    """Of `count` tensors: scale [count], scale_inv [count] = 1 / scale, amax_history [steps, count]; all float32.

    Row 0 of the history is that of the step that runs. scale is never written into, but replaced: what a forward pass
    saved for its backward stays as it was. `fixed` (of CUDA graphs, which know addresses) writes into it. The history
    is the beginning of memory that is there from the start: a compiled backward writes into it, and takes none that a
    graph made. It lies as _history.py says; `place` tells where.
    """

    _whole: tuple[Any, ...] | None = None  # of the class: states that were pickled before had none

    def __init__(self, count: int, length: int, device: torch.device) -> None:
        self.scale = torch.ones(count, dtype=torch.float32, device=device)
        self.scale_inv = torch.ones(count, dtype=torch.float32, device=device)
        self._rows, self.place = _history.zeros(length, count, device)
        self.length = length
        self.fixed = False
        self._known: tuple[Any, ...] | None = None
        self._newest: tuple[Any, ...] | None = None
        self.maxima: tuple[Any, ...] | None = None  # of the update that begins with this one: `_maxima`

    def __getstate__(self) -> dict[str, Any]:
        made = dict.fromkeys(("_whole", "_known", "_newest", "maxima", "place"))
        return {**self.__dict__, **made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hold(self._rows, self._rows.device)

    def _hold(self, rows: torch.Tensor, device: torch.device) -> None:
        """Takes a copy of all rows."""
        length, count = rows.shape
        made, self.place = _history.zeros(length, count, device)
        with torch.no_grad():
            self._rows = made.copy_(rows)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scales, 1 / scales as _apart gives them, the history) of now, of which eager calls take what they need."""
        scale = self.scale
        known = self._whole
        if known is not None and known[0] is scale and known[1] == scale._version:
            return scale, known[2], self._rows
        inverse = _apart(torch.reciprocal(scale))
        if _is_kept(scale) and not (scale.is_inference() or torch.is_inference_mode_enabled()):
            self._whole = scale, scale._version, inverse
        return scale, inverse, self._rows

    def scalars(self, scale: torch.Tensor) -> tuple[Sequence[torch.Tensor], ...]:
        """(scales, 1 / scales, row 0 of the history), each a scalar for each tensor.

        scale: this state's, or what that was before. They are made once for each step; a CUDA graph makes its own each
        time that it is replayed, as what traces does.
        """
        if (
            not _is_kept(scale)
            or scale.is_inference()
            or torch.is_inference_mode_enabled()
            or is_captured(scale)
        ):
            return *_both(scale), self.amax_history[0].unbind()
        if self._newest is None or self._newest[0] is not self._rows:
            self._newest = self._rows, self._rows[0].unbind()
        known = self._known
        if known is not None and known[0] is scale and known[1] == scale._version:
            return *known[2], self._newest[1]
        whole = self._whole
        if whole is not None and whole[0] is scale and whole[1] == scale._version:
            found = scale.unbind(), _each(whole[2])
        else:
            found = _both(scale)
        if scale is self.scale:
            self._known = scale, scale._version, found
        return *found, self._newest[1]

    @property
    def amax_history(self) -> torch.Tensor:
        rows = self._rows
        return rows if rows.shape[0] == self.length else rows[: self.length]

    @amax_history.setter
    def amax_history(self, history: torch.Tensor) -> None:
        if self.fixed and history.shape == self.amax_history.shape:  # what replays finds it where it is
            self.amax_history.copy_(history)
            return
        self._hold(history, self.scale.device)
        self.length = history.shape[0]

    def resize(self, length: int) -> None:
        """Keeps the newest rows, or adds rows of 0."""
        with _kept_tensors(is_traced()):
            missing = length - self._rows.shape[0]
            if missing > 0:
                self._hold(torch.nn.functional.pad(self._rows, (0, 0, 0, missing)), self._rows.device)
            if length > self.length:
                self._rows[self.length : length].zero_()
        self.length = length

    def move(self, device: torch.device) -> None:
        """To another device; dtypes stay."""
        if device.type != "meta" and self.scale.device != device:
            with _kept_tensors(is_traced()):
                self.scale, self.scale_inv = self.scale.to(device), self.scale_inv.to(device)
                self._hold(self._rows, device)

    def replace(
        self, scale: torch.Tensor, scale_inv: torch.Tensor, apart: torch.Tensor | None = None
    ) -> None:
        """Takes new scales; apart: 1 / they as _apart gives them, where it is known."""
        if self.fixed:
            torch._foreach_copy_([self.scale, self.scale_inv], [scale, scale_inv])
            return
        self.scale, self.scale_inv = scale, scale_inv
        if apart is not None:
            self._whole = scale, scale._version, apart


def fix(scalings: Sequence[Scaling]) -> None:
    """From now on their scales stay where they are, one behind the other in memory that is nobody else's."""
    of_device: dict[torch.device, list[Scaling]] = {}
    for scaling in sorted(scalings, key=lambda scaling: scaling.place[0]):
        of_device.setdefault(scaling.scale.device, []).append(scaling)
    for members in of_device.values():
        sizes = [scaling.scale.shape[0] for scaling in members]
        scale, inverse = (
            torch.cat(column) for column in zip(*((s.scale, s.scale_inv) for s in members), strict=True)
        )
        for scaling, *parts in zip(members, scale.split(sizes), inverse.split(sizes), strict=True):
            scaling.scale, scaling.scale_inv = parts
            scaling.fixed = True


def _both(scale):
    """(scales, 1 / scales), one for each tensor."""
    if is_traced():  # each a tensor of its own, wherever the compiler lays it
        return scale.unbind(), [torch.reciprocal(one) for one in scale.unbind()]
    return scale.unbind(), _each(_apart(torch.reciprocal(scale)))


def _apart(numbers):
    """Of a GPU [n, 4], in one pass for all: cublasLt takes scales on multiples of 16 bytes alone. Else as they are."""
    return numbers[:, None].expand(-1, 4).contiguous() if numbers.is_cuda else numbers


def _each(numbers):
    """Each of what _apart gave by itself."""
    return (numbers if numbers.dim() == 1 else numbers[:, 0]).unbind()


# torch.cuda's function without its frame; a torch without GPUs has that alone.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]
_transform = torch._C._functorch.peek_interpreter_stack  # of torch.func, which wraps what is made within
_TRANSFORMS = torch._C.DispatchKeySet(
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
) | torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)


def _is_kept(like):
    """Whether what is made of a tensor now is kept for later steps: it is no tracer's, and none without numbers."""
    return type(like) is torch.Tensor and not is_traced() and not is_fake() and _transform() is None


def is_fake():
    """Whether tensors that are made now have no numbers (FakeTensorMode)."""
    return not is_traced() and torch._C._get_dispatch_mode(_FAKE) is not None


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether what is done with it now goes into a CUDA graph."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and _is_capturing()


def kept_versions(histories):
    """Histories are no values of any gradient: autograd need not hear that a step ended."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch.autograd._unsafe_preserve_version_counter(tuple(histories))


def update(scalings: Sequence[Scaling], maxima: Sequence[float], recipe: DelayedScaling) -> bool:
    """Makes new scales of the histories, which move on by a row. maxima: the largest number of each one's format.

    Returns whether a CUDA graph makes them.
    """
    if not scalings:
        return False
    traced, captured = is_traced(), is_captured(scalings[0].scale)
    if captured:
        for scaling in scalings:
            scaling.fixed = True  # what replays finds the scales where they are now
    with _kept_tensors(traced):
        if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
            _update_by_functions(scalings, maxima, recipe)
            return captured
        if not traced:  # as they lie
            pairs = sorted(zip(scalings, maxima, strict=True), key=lambda pair: pair[0].place[0])
            scalings, maxima = zip(*pairs, strict=True)
        kept: list[torch.Tensor] = []
        taken: list[torch.Tensor] = []
        for scaling, (new, one_by, apart) in zip(scalings, _made(scalings, maxima, recipe), strict=True):
            if scaling.fixed:
                kept += scaling.scale, scaling.scale_inv
                taken += new, one_by
            else:
                scaling.replace(new, one_by, apart)
        if kept:
            torch._foreach_copy_(kept, taken)
    return captured


class Repeated:
    """The update of the same scalings once more, where _casts.has_new_scales; it keeps none of them alive.

    said: of the recipe, whatever an update goes by.
    """

    def __init__(self, scalings: Sequence[Scaling], said: tuple[Any, ...]) -> None:
        self._places = [scaling.place[0] for scaling in scalings]
        self._order = sorted(range(len(scalings)), key=self._places.__getitem__)
        self._maxima = scalings[self._order[0]].maxima
        self._said = said

    def run(self, scalings: Sequence[Scaling], said: tuple[Any, ...], margin: float, algorithm: Any) -> bool:
        """Returns False, with nothing done, where something is no longer as it was."""
        if said != self._said or self._maxima is None or torch.is_inference_mode_enabled():
            return False
        histories, olds = [], []
        for i in self._order:
            scaling = scalings[i]
            rows = scaling._rows
            if scaling.fixed or scaling.place[0] != self._places[i]:
                return False
            histories.append(rows if rows.shape[0] == scaling.length else rows[: scaling.length])
            olds.append(scaling.scale)
        if scalings[self._order[0]].maxima is not self._maxima or (olds[0].is_cuda and _is_capturing()):
            return False
        made = _casts.new_scales(histories, olds, self._maxima[1], margin, algorithm)
        if made is None:
            return False
        for i, of in zip(self._order, made, strict=True):
            scaling = scalings[i]
            scale, scaling.scale_inv, apart = of
            scaling.scale, scaling._whole = scale, (scale, scale._version, apart)
        return True


def _made(scalings, maxima, recipe):
    """Of each: new scales, 1 / they, and the same as _apart gives them, or None."""
    olds = [scaling.scale for scaling in scalings]
    histories = [scaling.amax_history for scaling in scalings]
    sizes = [old.shape[0] for old in olds]
    numbers = _maxima(scalings[0], tuple(maxima), sizes)
    how = histories, olds, numbers, recipe.margin, recipe.amax_compute_algo
    found = _casts.new_scales(*how) if _casts.has_new_scales() else None
    if found is not None:
        return found
    with kept_versions(histories):
        scale, inverse = _casts.update_scales(*how)
    parts = [torch.split_with_sizes(tensor, sizes) for tensor in (scale, inverse)]
    parts.append([None] * len(sizes) if is_traced() else torch.split_with_sizes(_apart(inverse), sizes))
    return zip(*parts, strict=True)


def _update_by_functions(scalings, maxima, recipe):
    """No history moves on before every function has given its scales."""
    with torch.no_grad(), kept_versions(scaling.amax_history for scaling in scalings):
        news = [_scale_by_functions(*of, recipe) for of in zip(scalings, maxima, strict=True)]
        for scaling, new in zip(scalings, news, strict=True):
            _move_on(scaling.amax_history)
            scaling.replace(new, torch.ones_like(new) / new)


def _maxima(owner, maxima, sizes):
    """float32 on the device of `owner`: each of `maxima` as often as `sizes` says.

    What was asked for last stays with the owner, the first whose scales are made: no step sends it there again.
    """
    like, key = owner.scale, (maxima, tuple(sizes))
    kept, known = _is_kept(like), owner.maxima
    if kept and known is not None and known[0] == key and known[1].device == like.device:
        return known[1]
    parts = zip(maxima, sizes, strict=True)
    found = torch.cat([like.new_full((size,), number) for number, size in parts])
    if kept and not is_captured(like):
        owner.maxima = key, found
    return found


def _kept_tensors(traced):
    """State that is made in inference mode, or within a transform of torch.func, serves behind it, too."""
    if traced:
        return contextlib.nullcontext()
    if _transform() is not None:
        return _outside_transforms()
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def _outside_transforms():
    """What is made within belongs to no transform of torch.func, and serves behind it."""
    with torch._C._ExcludeDispatchKeyGuard(_TRANSFORMS), torch.inference_mode(False):
        yield


def _move_on(history):
    history.copy_(history.roll(-1, 0))
    history[0].zero_()


def _scale_by_functions(scaling, largest, recipe):
    """The new scales of one, by functions of the recipe; a function sees a copy of the history."""
    history, algorithm = scaling.amax_history.clone(), recipe.amax_compute_algo
    if callable(algorithm):
        amax = _checked("amax_compute_algo", algorithm(history), scaling.scale)
    else:
        amax = history.amax(0) if algorithm == "max" else history[0].clone()
    make = recipe.scaling_factor_compute_algo
    if make is None:
        return _casts.delayed_scale(amax, scaling.scale, largest, recipe.margin)
    return _checked(
        "scaling_factor_compute_algo", make(amax, scaling.scale.clone(), largest, recipe), scaling.scale
    )


def _checked(name, made, like):
    """What a function of the recipe gave: float32, a number for each tensor."""
    if not isinstance(made, torch.Tensor) or made.shape != like.shape:
        given = f"shape {list(made.shape)}" if isinstance(made, torch.Tensor) else repr(made)
        raise ValueError(f"{name} must give a tensor of shape {list(like.shape)}, not {given}")
    return made.to(like.device, like.dtype)
