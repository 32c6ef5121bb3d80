"""When gradients are reduced over the data parallel ranks: once a step, in the last backward pass of each part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex.parallel._waiting import PASSES, waiting
from apex.transformer import parallel_state


class GradSync:
    """A context around a step: nothing is reduced within, but in the last backward pass of each part, or behind it.

    Args:
        models: this stage's parts.
        stage, stages: which of how many.
        handler: makes a context in which nothing is reduced; None: no_sync of those that are torch's
            DistributedDataParallel.
        grad_func: reduces gradients in place of the last passes. Of one part it is called without arguments, behind
            all passes, on all stages but the first, which has no time left to fill and reduces in its last pass. Of
            several, with each one's parameters, after as many passes more as there are stages before, so that stages
            do it at one time.
        param_func: of several parts: called with each one's parameters before they are needed.
    """

    def __init__(
        self,
        models: list[nn.Module],
        stage: int,
        stages: int,
        handler: Callable[[], Any] | None = None,
        grad_func: Callable[..., Any] | None = None,
        param_func: Callable[..., Any] | None = None,
    ) -> None:
        self._models, self._stage, self._stages = models, stage, stages
        self._handler, self._param_func = handler, param_func
        self._grad_func = None if grad_func is not None and len(models) == 1 and stage == 0 else grad_func
        self._held = contextlib.ExitStack()
        self._passes = 0
        self._due: list[tuple[int, int]] = []  # (number of the backward pass, part)

    def __enter__(self) -> GradSync:
        self._hold()
        return self

    def __exit__(self, *_: Any) -> None:
        self._held.close()

    def finish(self) -> None:
        """Behind all passes: reduces what is left."""
        self._held.close()
        for _number, chunk in self._due:
            self._reduce(chunk)

    def before_forward(self, number: int) -> None:
        """Of this stage's forward pass `number`, from 0."""
        if self._param_func is not None and number == 0:
            for model in self._models[:2]:
                self._param_func(model.parameters())
        chunk, first = divmod(number + self._stage, self._stages)
        if self._param_func is not None and first == 0 and 2 <= chunk + 1 < len(self._models):
            self._param_func(self._models[chunk + 1].parameters())

    @contextlib.contextmanager
    def backward(self, chunk: int, last: bool, outputs: list[Any]) -> Iterator[None]:
        """Around a backward pass of a part. last: its last one of the step. outputs: of its forward pass."""
        if last and self._grad_func is None:
            self._held.close()
            self._expect(self._models[chunk], outputs)
        data = parallel_state.get_data_parallel_group()
        with (
            waiting("gradients over copies of the model", PASSES, group=data)
            if last
            else contextlib.nullcontext()
        ):
            yield
        if last and self._grad_func is not None:
            self._due.append((self._passes + (self._stage if len(self._models) > 1 else 0), chunk))
        if len(self._models) > 1:
            while self._due and self._due[0][0] <= self._passes:
                self._held.close()
                self._reduce(self._due.pop(0)[1])
            self._hold()
        self._passes += 1

    def _reduce(self, chunk):
        self._grad_func(*([self._models[chunk].parameters()] if len(self._models) > 1 else []))

    def _hold(self):
        """Enters the context, unless it is entered."""
        self._held.close()
        if self._handler is not None:
            self._held.enter_context(self._handler())
            return
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                self._held.enter_context(model.no_sync())

    def _expect(self, model, outputs):
        """Tells DistributedDataParallel, whose forward pass was not to be reduced, that this backward pass is."""
        if self._handler is None and isinstance(model, DistributedDataParallel):
            tensors = (
                [x for x in outputs if isinstance(x, torch.Tensor)] if model.find_unused_parameters else []
            )
            model.reducer.prepare_for_backward(tensors)
