"""Running a plan: passes, messages between them, and what becomes of a stage that fails.

A stage whose pass raises sends zeros from then on, so that no other one waits for it; when the step is over all ranks
of the model learn of it, and raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apex.parallel._failures import VAIN, Together
from apex.parallel._waiting import waiting
from apex.transformer import _collectives as collectives
from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel import p2p_communication as p2p
from apex.transformer.pipeline_parallel.schedules._grad_sync import GradSync
from apex.transformer.pipeline_parallel.schedules._plan import Pass, plan, warmup
from apex.transformer.pipeline_parallel.schedules.common import (
    backward_step,
    device_of,
    forward_step,
    free_output_tensor,
)
from apex.transformer.pipeline_parallel.utils import get_kth_microbatch, get_num_microbatches
from apex.transformer.tensor_parallel.utils import current_device

Shapes = Sequence[Sequence[int]]


@dataclasses.dataclass
class Options:
    """What both pipelined schedules take.

    shapes: of what a part gives to the next one, by part.
    """

    shapes: Callable[[int], Shapes]
    dtype: torch.dtype | None
    forward_only: bool
    grad_scaler: torch.amp.GradScaler | None
    disable_autocast: bool
    deallocate: bool
    scatter_gather: bool
    uncheckpointed: int | None


class Run:
    """One step of this stage: `run` returns what the loss functions returned."""

    def __init__(
        self, forward_step_func: Any, batch: Any, models: list[nn.Module], options: Options, sync: GradSync
    ):
        self._function, self._batch, self._models, self._options = forward_step_func, batch, models, options
        self._sync = sync
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._stages, self._chunks = parallel_state.get_pipeline_model_parallel_world_size(), len(models)
        self._parts, self._microbatches = self._stages * self._chunks, get_num_microbatches()
        self._ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        self._received: dict[Pass, list[p2p.FutureTensor]] = {}
        self._kept: dict[Pass, tuple[list[Any], list[Any]]] = {}
        self._losses: list[Any] = []
        self._done = 0
        self._failure: tuple[int, Exception] | None = None
        self._sent: p2p.Work | None = None
        self._device = device_of(*models)
        # The others learn of a failure when the step is over. Only those who wait within a pass learn of it at once.
        answered = (
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_model_parallel_group(),
        )
        self._together = Together("a pass of a pipeline", answered)

    def run(self) -> list[Any]:
        with self._together:
            return self._run()

    def _run(self):
        agree(self._settings())
        before = parallel_state.get_virtual_pipeline_model_parallel_rank()
        sizes = self._stage, self._stages, self._chunks, self._microbatches, self._options.forward_only
        try:
            with self._sync:
                for tick in plan(*sizes):
                    outputs = self._pass(tick.number, tick.step) if tick.step else []
                    self._exchange(tick, outputs)
                    if tick.step and not self._options.forward_only:
                        free_output_tensor(outputs if tick.step.forward else None, self._options.deallocate)
                self._wait_for_sent()
            if self._failure is None:
                with self._failing(tick.number + 1):
                    self._sync.finish()
        except Exception as error:
            if self._failure is not None:  # which the others wait for in vain, so that messages fail, too
                raise self._failure[1] from error
            raise
        finally:
            parallel_state.set_virtual_pipeline_model_parallel_rank(before)
        self._raise_failures()
        return self._losses

    def _settings(self):
        o = self._options
        shapes = [[list(map(int, shape)) for shape in o.shapes(part)] for part in range(self._parts - 1)]
        names = ("dtype", "forward_only", "scatter_gather")
        return {
            "microbatches": self._microbatches,
            "parts": self._parts,
            "shapes": shapes,
            **{name: str(getattr(o, name)) for name in names},
        }

    def _pass(self, number, step):
        """The tensors that a pass gives to the next one: zeros, once one has failed."""
        target = step.target(self._parts)
        if self._failure is None:
            with self._failing(number):
                if self._chunks > 1:
                    parallel_state.set_virtual_pipeline_model_parallel_rank(step.part // self._stages)
                outputs = self._forward(step) if step.forward else self._backward(step)
                if target is None:
                    return []
                return self._checked(step, outputs) if step.forward else self._whole(step, outputs)
        for future in self._received.pop(step.source(self._parts), ()):
            future.get()
        return [] if target is None else self._whole(step, [None] * len(self._shapes(step)))

    @contextlib.contextmanager
    def _failing(self, number):
        """Keeps what is raised, and at which tick, until the step is over."""
        try:
            yield
        except Exception as error:
            self._failure = number, error
            self._kept.clear()
            self._together.tell(error)

    def _forward(self, step):
        o, chunk = self._options, step.part // self._stages
        source = step.source(self._parts)
        inputs = [future.get() for future in self._received.pop(source)] if source else [None]
        if o.forward_only:
            inputs = [x if x is None else x.detach() for x in inputs]
        checkpointed = None
        if o.uncheckpointed is not None:
            window = warmup(self._stage, self._stages, self._chunks, self._microbatches) + 1
            checkpointed = self._done % window >= o.uncheckpointed
        self._sync.before_forward(self._done)
        self._done += 1
        outputs = forward_step(
            *(self._function, get_kth_microbatch(self._batch, step.microbatch), self._models[chunk], inputs),
            *(self._losses, o.dtype, o.disable_autocast, checkpointed),
        )
        outputs = self._cast(step, outputs)
        if not o.forward_only:
            self._kept[step] = inputs, outputs
        return outputs

    def _backward(self, step):
        o, source = self._options, step.source(self._parts)
        inputs, outputs = self._kept.pop(step._replace(forward=True))
        grads = [future.get() for future in self._received.pop(source)] if source else [None]
        chunk = step.part // self._stages
        with self._sync.backward(chunk, step.microbatch == self._microbatches - 1, outputs):
            return backward_step(
                inputs, outputs, grads, grad_scaler=o.grad_scaler, deallocate_pipeline_outputs=o.deallocate
            )

    def _shapes(self, step):
        """Of what a pass gives to the next one."""
        return self._options.shapes(step.part if step.forward else step.part - 1)

    def _cast(self, step, outputs):
        """Floating outputs in the dtype of messages, if one was named."""
        dtype = self._options.dtype
        if dtype is None or step.target(self._parts) is None:
            return outputs
        return [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in outputs]

    def _checked(self, step, outputs):
        """Raises where outputs are not what the next stage waits for."""
        dtype = self._options.dtype or torch.float32
        wanted = [(tuple(shape), dtype) for shape in self._shapes(step)]
        found = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in outputs]
        if found != wanted:
            raise RuntimeError(
                f"{self._name(step)} are {found}, and the next stage waits for {wanted}, which follows from "
                "tensor_shape, decoder_sequence_length, sequence_parallel_enabled and dtype (None: float32)"
            )
        return outputs

    def _whole(self, step, tensors):
        """Zeros in place of what is not there."""
        dtype = self._options.dtype or torch.float32
        return [
            torch.zeros(*shape, dtype=dtype, device=self._device) if x is None else x
            for x, shape in zip(tensors, self._shapes(step), strict=True)
        ]

    def _name(self, step):
        what = "activations" if step.forward else "gradients"
        part = f", part {step.part // self._stages + 1} of {self._chunks}" if self._chunks > 1 else ""
        return f"the {what} of microbatch {step.microbatch} that stage {step.part % self._stages} sends{part}"

    def _exchange(self, tick, outputs):
        sends = []
        if outputs:
            peer = self._ranks[tick.step.target(self._parts).part % self._stages]
            sends = [p2p.Send(x, peer, self._name(tick.step)) for x in outputs]
        receives = [(step, shape) for step in tick.received for shape in self._shapes(step)]
        if not (sends or receives):
            return
        self._wait_for_sent()
        futures, self._sent = p2p.exchange(
            sends,
            [
                p2p.Receive(
                    *(shape, self._options.dtype or torch.float32, self._device),
                    *(self._ranks[step.part % self._stages], self._name(step)),
                )
                for step, shape in receives
            ],
            self._options.scatter_gather,
        )
        # They are waited for when they are needed: neighbours need not be at the same tick at the same time.
        for (step, _), future in zip(receives, futures, strict=True):
            self._received.setdefault(step, []).append(future)

    def _wait_for_sent(self):
        if self._sent is not None:
            self._sent.wait()
            self._sent = None

    def _raise_failures(self):
        """Raises on every rank of the model, if there is a failure on any."""
        group = parallel_state.get_model_parallel_group()
        failed = torch.tensor(float(self._failure is not None), dtype=torch.float32, device=_home(group))
        if not collectives.all_reduce(failed, group, "whether all stages ran", dist.ReduceOp.MAX).item():
            return
        mine = None
        if self._failure is not None:
            number, error = self._failure
            mine = number, f"rank {dist.get_rank()} (stage {self._stage}): {type(error).__name__}: {error}"
        found = sorted(filter(None, _gathered(mine, group, "why a stage failed")))
        told = [text for _, text in found if VAIN not in text] or [text for _, text in found]  # causes first
        if self._failure is not None and told[0] == mine[1]:
            raise self._failure[1]
        raise RuntimeError(
            f"the step failed on another rank, and gradients of this one are of no use: {'; '.join(told)}"
        ) from (self._failure[1] if self._failure else None)


_agreed: tuple[Any, set[str]] = None, set()


def agree(settings: dict[str, Any]) -> None:
    """Raises RuntimeError on every rank of the model if their settings differ; asks when settings are new."""
    global _agreed
    group, text = parallel_state.get_model_parallel_group(), repr(settings)
    if _agreed[0] is not group:
        _agreed = group, set()
    if text in _agreed[1] or dist.get_backend(group) == "fake":
        return
    said = _gathered(text, group, "the arguments of a schedule")
    if len(set(said)) > 1:
        ranks = dist.get_process_group_ranks(group)
        told = {
            other: [rank for rank, one in zip(ranks, said, strict=True) if one == other] for other in said
        }
        raise RuntimeError(
            "the ranks' schedules differ: "
            + "; ".join(f"ranks {who}: {other}" for other, who in told.items())
        )
    _agreed[1].add(text)


def _gathered(value, group, what):
    found: list[Any] = [None] * dist.get_world_size(group)
    with waiting(what, collectives.WHY, group=group):
        dist.all_gather_object(found, value, group=group)
    return found


def _home(group):
    """Where tensors of a group's collectives lie."""
    return torch.device("cpu") if dist.get_backend(group) in ("gloo", "fake") else current_device()
