"""Schedules of pipelines as lists: what runs when, that messages meet, what stages keep."""

from __future__ import annotations

import itertools

import pytest

from apex.transformer.pipeline_parallel.schedules._plan import Pass, order, plan, timeline

SIZES = [
    (stages, chunks, microbatches)
    for stages, chunks, microbatches in itertools.product(
        (1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4, 8, 9, 16, 24)
    )
    if chunks == 1 or (stages > 1 and microbatches % stages == 0)
]


@pytest.mark.parametrize("forward_only", [False, True], ids=["both", "forward"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pass_runs_once_and_in_order(sizes, forward_only):
    """What is taken is there before; gradients of a part add up in the order of microbatches, whatever the split."""
    stages, chunks, microbatches = sizes
    parts = stages * chunks
    ticks = {step: tick for tick, now in enumerate(timeline(*sizes, forward_only)) for step in now.values()}
    directions = (True,) if forward_only else (True, False)
    assert set(ticks) == {
        Pass(*each) for each in itertools.product(directions, range(microbatches), range(parts))
    }
    for step, tick in ticks.items():
        source = step.source(parts)
        assert source is None or ticks[source] < tick
        if not step.forward:
            assert ticks[step._replace(forward=True)] < tick
        if step.microbatch:
            assert ticks[step._replace(microbatch=step.microbatch - 1)] < tick


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ticks_in_which_a_stage_waits(sizes):
    """The schedules' own arithmetic: 2 (stages - 1) ticks beside 2 passes of each microbatch through each part."""
    stages, chunks, microbatches = sizes
    assert len(timeline(*sizes, False)) == 2 * chunks * microbatches + 2 * (stages - 1)
    assert len(timeline(*sizes, True)) == chunks * microbatches + stages - 1


@pytest.mark.parametrize("forward_only", [False, True], ids=["both", "forward"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_messages_meet(sizes, forward_only):
    """Where a batch of messages ends only with all of them, and begins only behind the one before, as NCCL's do."""
    stages, chunks, _ = sizes
    parts = stages * chunks
    batches = []
    for stage in range(stages):
        here, had = [], {None}
        for tick in plan(stage, *sizes, forward_only):
            if tick.step:
                assert tick.step.source(parts) in had
            target = tick.step and tick.step.target(parts)
            had.update(tick.received)
            sent = {tick.step} if target else set()
            if sent or tick.received:
                here.append(sent | set(tick.received))
        batches.append(here)
    while any(batches):
        begun = [set(here[0]) if here else set() for here in batches]
        over = {step for mine in begun for step in mine if sum(step in other for other in begun) == 2}
        assert over, f"nothing moves: {begun}"
        for here in batches:
            if here:
                here[0] -= over
                if not here[0]:
                    here.pop(0)


@pytest.mark.parametrize("backward", [0.5, 1, 2, 3])
@pytest.mark.parametrize("sizes", [size for size in SIZES if size[0] > 1 and size[2] >= 2 * size[0]], ids=str)
def test_seconds_in_which_a_stage_waits(sizes, backward):
    """Also where backward passes take longer than forward ones, or shorter: a stage waits for what it needs, when it
    needs it, and before it sends for what it sent before."""
    stages, chunks, microbatches = sizes
    parts = stages * chunks
    plans = [{tick.number: tick for tick in plan(stage, *sizes, False)} for stage in range(stages)]
    now, there, under_way = [0.0] * stages, {None: 0.0}, [[] for _ in range(stages)]
    for number in range(len(timeline(*sizes, False))):
        ticks = [(stage, plans[stage][number]) for stage in range(stages) if number in plans[stage]]
        for stage, (step, received) in ((stage, tick[1:]) for stage, tick in ticks):
            if step:
                now[stage] = (
                    max(now[stage], there[step.source(parts)]) + (1 if step.forward else backward) / chunks
                )
            if received or (step and step.target(parts)):
                now[stage] = max([now[stage], *(there[sent] for sent in under_way[stage])])
                under_way[stage] = []
        for stage, tick in ticks:
            for step in tick.received:
                sender = step.part % stages
                there[step] = max(now[stage], now[sender])
                under_way[sender].append(step)
    assert max(now) == pytest.approx((microbatches + (stages - 1) / chunks) * (1 + backward), rel=1e-9)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_a_stage_keeps(sizes):
    """Microbatches whose gradients are not there yet: with one part a stage, those of the stages behind, and one."""
    stages, chunks, microbatches = sizes
    for stage in range(stages):
        kept = most = 0
        for step in order(stage, *sizes, False):
            kept += 1 if step.forward else -1
            most = max(most, kept)
        assert kept == 0
        ahead = stages - stage - 1
        limit = ahead + 1 if chunks == 1 else 2 * ahead + (chunks - 1) * stages + 1
        assert most == min(limit, microbatches * chunks)


def test_known_schedules():
    """f and b are passes of a microbatch, through a stage's parts A and B; a dot is a tick without one."""

    def drawn(stage, stages, *sizes):
        return " ".join(
            f"{'f' if now[stage].forward else 'b'}{now[stage].microbatch}{'AB'[now[stage].part // stages]}"
            if stage in now
            else "."
            for now in timeline(stages, *sizes, False)
        )

    assert drawn(0, 2, 1, 3) == "f0A f1A . b0A f2A b1A . b2A"
    assert drawn(1, 2, 1, 3) == ". f0A b0A f1A b1A f2A b2A ."
    assert drawn(0, 2, 2, 2) == "f0A f1A f0B f1B . b0B . b1B b0A b1A"
    assert drawn(1, 2, 2, 2) == ". f0A f1A f0B b0B f1B b1B b0A b1A ."
