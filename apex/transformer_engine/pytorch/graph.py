"""CUDA graphs of layers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from apex.transformer_engine.common.recipe import DelayedScaling, Recipe
from apex.transformer_engine.pytorch import _scaling
from apex.transformer_engine.pytorch._state import LayerState, current
from apex.transformer_engine.pytorch.module.base import TransformerEngineBaseModule

_INSTEAD = {
    "fp8_weight_caching": "leave it False: a replay casts the weights",
    "sample_kwargs": "give inputs by position, in sample_args",
    "_order": "call it once for each stage of the pipeline",
}


def _states(modules):
    return [
        m._state for module in modules for m in module.modules() if isinstance(m, TransformerEngineBaseModule)
    ]


@contextlib.contextmanager
def _captured(enabled, calibrating, recipe, group):
    """The autocast of a capture: it makes no new scales, and waits for no rank."""
    before, depth, reduced = current.keep(), current.depth, current.reduced
    current.restore((enabled, calibrating, recipe, group))
    current.depth, current.reduced, current.graphed = depth + 1, True, True
    try:
        yield
    finally:
        current.restore(before)
        current.depth, current.reduced, current.graphed = depth, reduced, False


@contextlib.contextmanager
def _kept(states: list[LayerState]):
    """What the warm-up records is taken back. Scales stay at their addresses from now on."""
    scalings = [scaling for state in states for scaling in (state.forward, state.backward)]
    before = [scaling.amax_history.clone() for scaling in scalings]
    _scaling.fix(scalings)
    try:
        yield
    finally:
        with torch.no_grad():
            for scaling, history in zip(scalings, before, strict=True):
                scaling.amax_history.copy_(history)


@contextlib.contextmanager
def _without_garbage():
    """Garbage goes now and is not collected meanwhile: a CUDA graph among it would break off what is captured."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _noting(forward, states, training):
    """forward, which says that the graph records magnitudes."""

    def run(*arguments, **keywords):
        if training:
            for state in states:
                state.note(_scaling.is_captured(state.forward.scale))
        return forward(*arguments, **keywords)

    return run


def make_graphed_callables(
    modules: torch.nn.Module | tuple[torch.nn.Module, ...],
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    fp8_enabled: bool = False,
    fp8_calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
    fp8_weight_caching: bool = False,
    sample_kwargs: Any = None,
    _order: list[int] | None = None,
) -> Callable[..., Any] | tuple[Callable[..., Any], ...]:
    """torch.cuda.make_graphed_callables of modules that multiply in FP8; call them within fp8_autocast.

    Args:
        modules, sample_args, num_warmup_iters, allow_unused_input: as of torch's function.
        fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group: of the fp8_autocast that is captured.
        fp8_weight_caching, sample_kwargs, _order: not here: weights are cast in every replay, inputs are positional,
            and graphs share no memory by the order of a pipeline.

    Returns the modules, whose forward replays the graph while they train as when it was captured. Their scales are
    made anew between replays, at their addresses; a backward pass belongs to the newest forward pass.

    Raises RuntimeError where there is no GPU, NotImplementedError where what is not here is asked for.
    """
    asked = dict(fp8_weight_caching=fp8_weight_caching, sample_kwargs=sample_kwargs, _order=_order)
    for name, value in asked.items():
        if value:
            raise NotImplementedError(f"make_graphed_callables: {name} is not here; {_INSTEAD[name]}")
    if not torch.cuda.is_available():
        raise RuntimeError("make_graphed_callables captures CUDA graphs, and torch sees no GPU here")
    group = modules if isinstance(modules, tuple) else (modules,)
    recipe = fp8_recipe or DelayedScaling()
    states = _states(group)
    if isinstance(recipe, DelayedScaling):
        for state in states:
            state.prepare(recipe, state.forward.scale.device)
    with _captured(fp8_enabled, fp8_calibrating, recipe, fp8_group), _kept(states), _without_garbage():
        made = torch.cuda.make_graphed_callables(
            modules, sample_args, num_warmup_iters=num_warmup_iters, allow_unused_input=allow_unused_input
        )
    if (fp8_enabled or fp8_calibrating) and isinstance(recipe, DelayedScaling):
        for module in group:
            module.forward = _noting(module.forward, _states((module,)), module.training)
    return made
