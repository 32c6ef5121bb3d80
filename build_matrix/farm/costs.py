"""What steps cost, from what they cost before, and how long a plan takes on N workers."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Collection, Iterable

from build_matrix.errors import BuildError
from build_matrix.farm import steps as steps_of
from build_matrix.farm.steps import Step
from build_matrix.store import Store

# Seconds of a step of a kind that was never made on this machine; measured on one core of a small machine.
FIRST = {
    "headers": 2.0,
    "object": 2.5,
    "library": 0.3,
    "3a": 20.0,
    "3b": 18.0,
    "code": 4.0,
    "wheel": 8.0,
    "test": 300.0,
}
HIT = 0.05  # looking up what is stored


class Costs:
    """Seconds a step takes when it is made: what the same step took last, else the median of its kind."""

    def __init__(self, store: Store):
        self.last: dict[tuple[str, str], float] = {}
        kinds: dict[str, list[float]] = {}
        for line in store.journal():
            self.last[line["kind"], line["name"]] = line["seconds"]
            kinds.setdefault(line["kind"], []).append(line["seconds"])
        self.median = {kind: statistics.median(seconds) for kind, seconds in kinds.items()}

    def of(self, step: Step) -> float:
        found = self.last.get((step.kind, step.name))
        return self.median.get(step.kind, FIRST.get(step.kind, 1.0)) if found is None else found

    def expected(self, steps: Iterable[Step], stored: Collection[str] = ()) -> dict[str, float]:
        """Seconds by step; those that are `stored` are looked up only."""
        return {step.id: HIT if step.id in stored else self.of(step) for step in steps}


def stored(steps: Iterable[Step], store: Store) -> set[str]:
    """The steps whose output is in the store, as far as this machine can tell: it may lack a compiler, and
    what is inside a wheel is not known before its parts are made. Outputs are not compared with their digests
    here."""
    steps, found = list(steps), set()
    for step in steps:
        # The unit of a step whose needs are not stored cannot be known without making them.
        if step.kind in ("wheel", "test") or not found.issuperset(step.needs):
            continue
        try:
            if store.folder(steps_of.unit(step, store)).is_dir():
                found.add(step.id)
        except (BuildError, OSError):
            continue
    return found


def ranks(steps: Iterable[Step], seconds: dict[str, float]) -> dict[str, float]:
    """Of each step: the seconds of the longest chain that begins with it. The step with the longest goes
    first."""
    steps = list(steps)
    found = {step.id: seconds[step.id] for step in steps}
    for step in reversed(steps):  # each comes after those it needs
        for name in step.needs:
            if name in found:
                found[name] = max(found[name], seconds[name] + found[step.id])
    return found


def simulate(
    steps: Iterable[Step], seconds: dict[str, float], workers: int, done: Collection[str] = ()
) -> float:
    """Seconds that `workers` need for those of `steps` that are not `done`, each worker taking the first that
    is ready by rank. With endless workers this is the critical path."""
    left = [step for step in steps if step.id not in done]
    rank = ranks(left, seconds)
    waiting = {step.id: {name for name in step.needs if name in rank} for step in left}
    dependents: dict[str, list[str]] = {}
    for name, needs in waiting.items():
        for need in needs:
            dependents.setdefault(need, []).append(name)
    ready = [(-rank[name], name) for name, needs in waiting.items() if not needs]
    heapq.heapify(ready)
    running: list[tuple[float, str]] = []
    now = 0.0
    while ready or running:
        while ready and len(running) < workers:
            name = heapq.heappop(ready)[1]
            heapq.heappush(running, (now + seconds[name], name))
        now, name = heapq.heappop(running)
        for dependent in dependents.get(name, ()):
            waiting[dependent].discard(name)
            if not waiting[dependent]:
                heapq.heappush(ready, (-rank[dependent], dependent))
    return now


def sum_and_product(steps: Iterable[Step], seconds: dict[str, float]) -> tuple[int, float, float]:
    """(cells, sum, product): the cells (torch, Python, arch, and the CPU's) that a plan serves, the seconds that it
    takes for all of them, and those of compiling each cell by itself, as a build that knows no packs does."""
    steps = list(steps)
    host = sum(seconds[s.id] for s in steps if s.kind in ("object", "library"))
    torches = {s.arguments[0]: seconds[s.id] for s in steps if s.kind == "3a"}
    bindings = {
        s.arguments: torches.get(s.arguments[0], 0.0) + seconds[s.id] for s in steps if s.kind == "3b"
    }
    packs: dict[str, float] = {}
    for step in steps:
        if step.kind == "code":
            packs[step.arguments[0]] = packs.get(step.arguments[0], 0.0) + seconds[step.id]
    archs = [0.0, *packs.values()]  # the CPU needs no pack
    product = sum(host + binding + pack for binding in bindings.values() for pack in archs)
    compiled = sum(seconds[s.id] for s in steps if s.kind in ("object", "library", "3a", "3b", "code"))
    return len(bindings) * len(archs), compiled, product
