"""What fp8_autocast and fp8_model_init say, and when delayed scaling makes its new scales.

The state is the process's, not a thread's. New scales are made of what a step recorded when the next outermost autocast
is entered; where magnitudes are reduced over ranks, at the first layer that trains in it, which all ranks reach.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from apex.transformer import _collectives as collectives
from apex.transformer_engine.common.recipe import DelayedScaling, Recipe
from apex.transformer_engine.pytorch import _casts, _formats, _scaling
from apex.transformer_engine.pytorch._scaling import Scaling


class _Autocast:
    """The innermost autocast."""

    def __init__(self):
        self.enabled = self.calibrating = False
        self.recipe: Recipe | None = None
        self.group: dist.ProcessGroup | None = None
        self.depth = 0
        self.outside = self.keep()  # behind the outermost one, in whatever order threads leave theirs
        self.reduced = False  # whether what waited for other ranks was reduced in it
        self.graphed = False  # whether graph.py captures: new scales are made around its graphs
        self.frame: Any = None  # of the checkpoint that runs
        self.quantized_init = False
        self.init_recipe: Recipe | None = None
        self.preserve = self.exporting = False

    def keep(self):
        return self.enabled, self.calibrating, self.recipe, self.group

    def restore(self, kept):
        self.enabled, self.calibrating, self.recipe, self.group = kept

    def fuses(self, delayed):
        """Whether what is made before a cast may be made in its pass; delayed: where scales are known before.

        Blocks' scales are made in the pass itself, and a weight's gradient without FP8 takes what is not cast.
        """
        recipe = self.recipe
        if not self.enabled or self.exporting or recipe is None:
            return False
        if isinstance(recipe, DelayedScaling):
            return not recipe.override_linear_precision[2]
        return not delayed and recipe.float8_current_scaling()


_DEFAULT = DelayedScaling()
_has_ranks = dist.is_initialized if dist.is_available() else lambda: False
current = _Autocast()
_pending: list[LayerState] = []
_in_graph: list[LayerState] = []  # whose new scales a CUDA graph makes that is captured in this autocast


class LayerState:
    """Of one layer: what delayed scaling knows of its `gemms` products.

    forward holds input, weight and output of each product, backward the gradients of output and input, in the order of
    the public engine.
    """

    def __init__(self, gemms: int, device: torch.device) -> None:
        length = DelayedScaling.amax_history_len
        self.forward, self.backward = Scaling(3 * gemms, length, device), Scaling(2 * gemms, length, device)
        self.recipe: DelayedScaling | None = None  # of a state that was loaded: not known yet
        self.group: dist.ProcessGroup | None = None
        self.pending = self.used = False
        self.kept: collections.deque[Any] = collections.deque()  # scales, of a checkpoint's first times

    def prepare(self, recipe: DelayedScaling, device: torch.device) -> None:
        """Histories as long as the recipe's, on the device."""
        self.recipe, self.group, self.used = recipe, current.group, True
        for scaling in (self.forward, self.backward):
            if scaling.scale.device != device:
                scaling.move(device)
            if scaling.length != recipe.amax_history_len:
                scaling.resize(recipe.amax_history_len)

    def note(self, captured: bool) -> None:
        """Its histories get something; captured: in a CUDA graph."""
        if not current.reduced:
            current.reduced = True
            if _pending:
                flush(True)
        if captured:
            self._update_in_graph()
        if not self.pending:
            self.wait()

    def _update_in_graph(self) -> None:
        """A CUDA graph makes new scales of what its replay before recorded, whoever made them until its capture."""
        if not (current.graphed or self.is_shared() or any(state is self for state in _in_graph)):
            _update([self])

    def wait(self) -> None:
        """For new scales."""
        if not self.pending:
            self.pending = True
            _pending.append(self)

    def rest(self) -> None:
        """Waits for none."""
        if self.pending:
            self.pending = False
            _pending[:] = [state for state in _pending if state is not self]

    def is_shared(self) -> bool:
        """Whether several ranks reduce their magnitudes together."""
        if not _has_ranks() or self.recipe is None or not self.recipe.reduce_amax:
            return False
        return dist.get_world_size(self.group) > 1

    def maxima(self) -> list[float]:
        """The largest numbers of the formats, forward and backward."""
        device, recipe = self.forward.scale.device, self.recipe or _DEFAULT
        return [_formats.largest(dtype) for dtype in _formats.dtypes_of(recipe, device)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        copied = object.__new__(LayerState)
        memo[id(self)] = copied
        copied.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        copied.group = self.group
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.pending:
            _pending.append(self)


def flush(reduced: bool) -> None:
    """New scales for layers whose magnitudes are reduced over ranks, or for the others."""
    if not _has_ranks() and (reduced or _steady.flush()):
        return
    taken = [state for state in _pending if state.is_shared() == reduced]
    if _scaling.is_fake():  # layers with numbers wait on
        taken = [state for state in taken if type(state.forward.scale) is not torch.Tensor]
    if not taken:
        return
    if reduced:
        _reduce(taken)
    steady = taken if len(taken) == len(_pending) and not _has_ranks() else []
    batches: dict[Any, list[LayerState]] = {}
    for state in taken:
        scale = state.forward.scale
        batches.setdefault((id(state.recipe), scale.device, type(scale)), []).append(state)
    for states in batches.values():
        _update(states)
        for state in states:  # behind the update: where it raises, nothing was updated, and they wait on
            state.pending = False
        _pending[:] = [state for state in _pending if state.pending]
    _steady.hold(steady if len(batches) == 1 else [])


class _Steady:
    """Layers of one recipe that waited for new scales together, as mostly in every step. It keeps none alive."""

    def __init__(self):
        self._states: list[weakref.ref[LayerState]] = []
        self._update: Any = None

    def hold(self, states):
        """They were updated; none: nothing will be as it was."""
        recipe = states[0].recipe if states else None
        self._states, self._update = [weakref.ref(state) for state in states], None
        if recipe is not None and not (
            callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo
        ):
            self._update = _scaling.Repeated(_scalings_of(states), _said(recipe))

    def flush(self) -> bool:
        """New scales, where it is they that wait, and all is as it was; by few frames."""
        if self._update is None or len(self._states) != len(_pending) or not _casts.has_new_scales():
            return False
        recipe, scalings = _pending[0].recipe, list[Scaling]()
        if recipe is None:
            return False
        for held, state in zip(self._states, _pending, strict=True):
            if held() is not state or state.recipe is not recipe:
                return False
            scalings += state.forward, state.backward
        if not self._update.run(scalings, _said(recipe), recipe.margin, recipe.amax_compute_algo):
            return False
        for state in _pending:
            state.pending = False
        _pending.clear()
        return True


def _scalings_of(states):
    return [scaling for state in states for scaling in (state.forward, state.backward)]


def _said(recipe):
    return recipe.fp8_format, recipe.amax_compute_algo, recipe.scaling_factor_compute_algo, recipe.margin


_steady = _Steady()


def _update(states):
    """New scales of states of one recipe and device."""
    scalings = _scalings_of(states)
    maxima = [largest for state in states for largest in state.maxima()]
    if _scaling.update(scalings, maxima, states[0].recipe or _DEFAULT):
        _in_graph.extend(states)


def _reduce(states):
    """Row 0 of all histories becomes the largest of all ranks, in one collective for each group."""
    groups: dict[Any, list[LayerState]] = {}
    for state in states:
        groups.setdefault(state.group, []).append(state)
    for group, members in groups.items():
        rows = [s.amax_history[0] for state in members for s in (state.forward, state.backward)]
        device = rows[0].device
        whole = torch.cat([row.to(device) for row in rows])
        whole = _largest_of_ranks(whole, group)
        with _scaling.kept_versions(
            s.amax_history for state in members for s in (state.forward, state.backward)
        ):
            for row, part in zip(rows, whole.split([row.numel() for row in rows]), strict=True):
                row.copy_(part)


def _largest_of_ranks(numbers, group):
    if torch.compiler.is_compiling():  # which knows this collective alone
        from torch.distributed import _functional_collectives as functional

        return functional.all_reduce(numbers, "max", group or dist.group.WORLD)
    what = "the largest magnitudes of FP8 tensors"
    return collectives.all_reduce(numbers, group, what, dist.ReduceOp.MAX)


def _name_recipe(recipe):
    """Layers whose state was loaded go on by the recipe that comes."""
    for state in _pending:
        if state.recipe is None:
            state.recipe = recipe if isinstance(recipe, DelayedScaling) else DelayedScaling()


def forget() -> None:
    """Drops what waits for new scales. Of tests, and after a step that failed."""
    for state in _pending:
        state.pending = False
    _pending.clear()
    _in_graph.clear()
    _steady.hold([])


class fp8_autocast:
    """Within, layers multiply in FP8.

    Args:
        enabled: False: they do not, also inside of an autocast in which they do.
        calibrating: with enabled=False: magnitudes are recorded all the same, so that scales are there later.
        fp8_recipe: one of apex.transformer_engine.common.recipe; None: DelayedScaling().
        fp8_group: whose ranks reduce magnitudes (DelayedScaling with reduce_amax); None: all ranks.

    May be nested, used again, and used as a decorator. Behind it the state is what it was, also after an exception.
    Raises TypeError for a recipe that is none.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: dist.ProcessGroup | None = None,
    ) -> None:
        if fp8_recipe is not None and not isinstance(fp8_recipe, Recipe):
            raise TypeError(f"fp8_recipe must be a recipe, not {fp8_recipe!r}")
        self._wanted = enabled, calibrating, fp8_recipe or DelayedScaling(), fp8_group
        self._before: list[Any] = []

    def __enter__(self) -> None:
        if current.depth == 0:
            current.reduced = False
            if _pending:
                _name_recipe(self._wanted[2])
                flush(False)
        self._before.append(current.keep())
        current.restore(self._wanted)
        current.depth += 1

    def __exit__(self, *_: object) -> None:
        current.depth -= 1
        before = self._before.pop()
        current.restore(before if current.depth else current.outside)
        if _in_graph and current.depth == 0:
            _in_graph.clear()

    def __call__(self, function: Any) -> Any:
        """Decorates a function."""

        @functools.wraps(function)
        def run(*arguments, **keywords):
            with self:
                return function(*arguments, **keywords)

        return run


class autocast(fp8_autocast):
    """fp8_autocast with the newer names: recipe, amax_reduction_group."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(enabled, calibrating, recipe, amax_reduction_group)


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Layers made within keep their weights in FP8 alone (docs/transformer_engine.md).

    Args:
        enabled: False: in their own dtype, also inside of another one.
        recipe: whose format they have; None: DelayedScaling().
        preserve_high_precision_init_val: the first values are kept on the CPU, for an optimizer's master weights:
            weight.get_high_precision_init_val(), clear_high_precision_init_val().
    """
    before = current.quantized_init, current.init_recipe, current.preserve
    current.quantized_init, current.init_recipe = enabled, recipe or DelayedScaling()
    current.preserve = preserve_high_precision_init_val
    try:
        yield
    finally:
        current.quantized_init, current.init_recipe, current.preserve = before


quantized_model_init = fp8_model_init
