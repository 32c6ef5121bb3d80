"""Which stage runs which pass at which tick, as lists, without any process.

A model of `chunks` parts on each of `stages` stages has stages * chunks parts, one behind the other; stage s holds the
parts s, s + stages, s + 2 * stages and so on. Every rank makes the whole plan, and so knows at which tick another
stage sends it something. It receives then, whenever it needs it: messages of a tick meet messages of the same tick
only, so that no order of batches can keep two stages waiting for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """A forward or backward pass of a microbatch through a part of the model."""

    forward: bool
    microbatch: int
    part: int

    def source(self, parts: int) -> Pass | None:
        """The pass whose output this one takes; None where it takes the batch, or the loss."""
        part = self.part - 1 if self.forward else self.part + 1
        return self._replace(part=part) if 0 <= part < parts else None

    def target(self, parts: int) -> Pass | None:
        """The pass that takes this one's output; None where it is the loss, or nobody's."""
        part = self.part + 1 if self.forward else self.part - 1
        return self._replace(part=part) if 0 <= part < parts else None


class Tick(NamedTuple):
    """What a stage does at a tick.

    Attributes:
        number: of the tick, the same on all stages.
        step: its own pass; None: it waits.
        received: other stages' passes of this tick whose outputs it gets.
    """

    number: int
    step: Pass | None
    received: tuple[Pass, ...]


def warmup(stage: int, stages: int, chunks: int, microbatches: int) -> int:
    """Forward passes of a stage before its first backward pass: as many as the gradients take to come back.

    With one part a stage, one more pass follows at once, which is counted among those that alternate.
    """
    ahead = stages - stage - 1
    passes = ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages
    return min(passes, microbatches * chunks)


def order(stage: int, stages: int, chunks: int, microbatches: int, forward_only: bool) -> list[Pass]:
    """The passes of a stage: forward ones to warm up, one forward and one backward in turn, the rest backward.

    Of several parts, `stages` microbatches in a row go through each.
    """

    def passes(forward):
        for k in range(microbatches * chunks):
            group, within = divmod(k, stages * chunks) if chunks > 1 else (k, 0)
            chunk, first = divmod(within, stages)
            microbatch = group * stages + first if chunks > 1 else k
            yield Pass(forward, microbatch, (chunk if forward else chunks - 1 - chunk) * stages + stage)

    forwards = list(passes(True))
    if forward_only:
        return forwards
    backwards = list(passes(False))
    ahead = warmup(stage, stages, chunks, microbatches)
    turns = [step for pair in zip(forwards[ahead:], backwards, strict=False) for step in pair]
    return forwards[:ahead] + turns + backwards[len(forwards) - ahead :]


@functools.lru_cache(maxsize=16)
def timeline(stages: int, chunks: int, microbatches: int, forward_only: bool) -> Sequence[dict[int, Pass]]:
    """{stage: pass} of each tick, where every pass takes one, and begins as soon as what it takes is there."""
    parts = stages * chunks
    left = [
        list(reversed(order(stage, stages, chunks, microbatches, forward_only))) for stage in range(stages)
    ]
    done: set[Pass | None] = {None}
    ticks = []
    while any(left):
        now = {
            stage: passes.pop()
            for stage, passes in enumerate(left)
            if passes and passes[-1].source(parts) in done
        }
        if not now:
            raise RuntimeError(
                f"a schedule of {microbatches} microbatches over {stages} x {chunks} parts cannot end"
            )
        done.update(now.values())
        ticks.append(now)
    return ticks


@functools.lru_cache(maxsize=64)
def plan(stage: int, stages: int, chunks: int, microbatches: int, forward_only: bool) -> tuple[Tick, ...]:
    """What a stage does, tick by tick; ticks without any of it are left out."""
    parts = stages * chunks
    found = []
    for number, now in enumerate(timeline(stages, chunks, microbatches, forward_only)):
        received = tuple(step for step in now.values() if _goes_to(step, stage, stages, parts))
        if stage in now or received:
            found.append(Tick(number, now.get(stage), received))
    return tuple(found)


def _goes_to(step, stage, stages, parts):
    target = step.target(parts)
    return target is not None and target.part % stages == stage
