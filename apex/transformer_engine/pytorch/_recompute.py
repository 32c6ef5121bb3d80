"""te.checkpoint: what it runs again in the backward pass multiplies with the scales of the first time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from apex.transformer.tensor_parallel import random as tensor_parallel_random
from apex.transformer_engine.pytorch._state import current


class _Frame:
    """The scales that the layers of one checkpoint took, in their order."""

    def __init__(self, tracker):
        self.again = False
        self._scales: list[Any] = []
        self._next = 0
        self._autocast = current.keep()
        self._tracker = tracker
        self._random = None if tracker is None else tracker().get_states()

    def scales(self, now, state):
        """Those of now, the first time; those of then afterwards. state: the layer's."""
        if not self.again:
            self._scales.append(now)
            return now
        self._next += 1
        return self._scales[self._next - 1]

    @contextlib.contextmanager
    def first(self):
        before, current.frame = current.frame, self
        try:
            yield
        finally:
            current.frame = before

    @contextlib.contextmanager
    def second(self):
        before, autocast, depth = current.frame, current.keep(), current.depth
        states = None if self._tracker is None else self._tracker().get_states()
        current.frame, self.again, self._next = self, True, 0
        current.restore(self._autocast)
        current.depth = depth + 1
        if self._tracker is not None:
            self._tracker().set_states(self._random)
        try:
            yield
        finally:
            current.frame, current.depth = before, depth
            current.restore(autocast)
            if self._tracker is not None:
                self._tracker().set_states(states)


class _Phase:
    """Of a checkpoint of somebody else: each layer keeps its scales of the first times, oldest first."""

    def __init__(self, again):
        self.again = again

    def scales(self, now, state):
        if not self.again:
            state.kept.append(now)
            return now
        if not state.kept:
            raise RuntimeError(
                "a layer is run again, and was not run the first time within a recompute phase"
            )
        return state.kept.popleft()


@contextlib.contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Within, layers run for a checkpoint of the caller's own: what is run again multiplies with the scales of then.

    activation_recompute: False: nothing is said. recompute_phase: False: the first time; True: again, in the backward
    pass, under the same autocast. Several first times may come before their seconds; of each layer the oldest is next.
    Raises RuntimeError for a layer that is run again more often than before.
    """
    before = current.frame
    if activation_recompute:
        current.frame = _Phase(recompute_phase)
    depth, current.depth = current.depth, current.depth + (1 if recompute_phase else 0)
    try:
        yield
    finally:
        current.frame, current.depth = before, depth


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """function(*args, **kwargs), which is run again in the backward pass: same scales, random numbers and autocast.

    Args:
        function: a layer, or anything that is made of layers.
        distribute_saved_activations: each tensor parallel rank keeps a part of the first argument; over the groups of
            apex.transformer.parallel_state, which tp_group must be then. As the older form of the public engine,
            checkpoint(function, True, get_rng_state_tracker, tp_group, *args), too.
        get_rng_state_tracker: gives what has get_states and set_states, as CudaRNGStatesTracker.
        use_reentrant: accepted; the checkpoint is torch's other kind, through which torch.autograd.grad goes.

    Raises what apex.transformer.tensor_parallel.checkpoint raises, where activations are distributed.
    """
    if args and isinstance(args[0], bool):  # the older form
        distribute_saved_activations, get_rng_state_tracker, tp_group, *rest = args
        args = tuple(rest)
    frame = _Frame(get_rng_state_tracker)
    if not distribute_saved_activations:
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (frame.first(), frame.second()), **kwargs
        )
    ran = False

    def run(*arguments):
        nonlocal ran
        context = frame.second() if ran else frame.first()
        ran = True
        with context:
            return function(*arguments, **kwargs)

    return tensor_parallel_random.checkpoint(run, True, *args)
