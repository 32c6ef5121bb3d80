"""What steps cost, from what they cost before, and how long a plan takes on N workers."""

from __future__ import annotations

import heapq
import json
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from build_matrix.errors import BuildError
from build_matrix.farm import steps as steps_of
from build_matrix.farm.steps import Done, Step
from build_matrix.spec import matrix
from build_matrix.store import Store, digest

# Seconds of a step of a kind that was never made on this machine: the means of a whole release on two cores.
FIRST = {
    "headers": 2.0,
    "object": 1.0,
    "library": 0.2,
    "3a": 32.0,
    "3b": 28.0,
    "code": 2.0,
    "wheel": 4.0,
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
        """Seconds that making a step is thought to take."""
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
    is ready by rank. With endless workers this is the critical path; no workers count as one, who is still to come."""
    workers = max(workers, 1)
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


@dataclass(frozen=True)
class Share:
    """What a part of the release takes when it is made once for all cells (`once`), and when every cell is compiled by
    itself, as a build that knows no packs does (`apart`); seconds."""

    part: str
    once: float
    apart: float


def sum_and_product(steps: Iterable[Step], seconds: dict[str, float]) -> tuple[int, list[Share]]:
    """(cells, shares): the cells (torch, Python, arch, and the CPU's, on each platform) that a plan serves, and what
    they cost."""
    steps, axes = list(steps), matrix.load()
    host: dict[str, float] = {}
    code: dict[str, float] = {}
    for step in steps:
        if step.kind in ("object", "library"):
            host[step.arguments[-1]] = host.get(step.arguments[-1], 0.0) + seconds[step.id]
        elif step.kind == "code":
            code[step.arguments[0]] = code.get(step.arguments[0], 0.0) + seconds[step.id]
    torches = {s.arguments: seconds[s.id] for s in steps if s.kind == "3a"}
    modules = {s.arguments: seconds[s.id] for s in steps if s.kind == "3b"}
    cells, apart_host, apart_bindings, apart_packs = 0, 0.0, 0.0, 0.0
    for (torch, _, platform), took in modules.items():
        served = axes.platform(platform).accelerators
        archs = [arch for arch in code if axes.pack(arch).arch.vendor in served]
        own = 1 + len(archs)  # the CPU needs no pack
        cells += own
        apart_host += own * host.get(platform, 0.0)
        apart_bindings += own * (torches.get((torch, platform), 0.0) + took)
        apart_packs += sum(code[arch] for arch in archs)
    return cells, [
        Share("host library", sum(host.values()), apart_host),
        Share("bindings", sum(torches.values()) + sum(modules.values()), apart_bindings),
        Share("packs", sum(code.values()), apart_packs),
    ]


RUNS = "runs.jsonl"  # one line a farm that was run to its end


def note(store: Store, steps: Iterable[Step], done: Collection[Done], workers: int, seconds: float) -> None:
    """Writes down how long a plan really took, to stand beside what is predicted for it."""
    line = {
        "plan": _plan(steps),
        "workers": workers,
        "seconds": round(seconds, 1),
        "steps": len(done),
        "stored": sum(step.stored for step in done),
    }
    store.root.mkdir(parents=True, exist_ok=True)
    with open(store.root / RUNS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def measured(store: Store, steps: Iterable[Step]) -> dict[int, float]:
    """workers -> seconds that this very plan took when nothing was stored, the last time."""
    wanted, found = _plan(steps), {}
    try:
        lines = (store.root / RUNS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            run = json.loads(line)
            if run["plan"] == wanted and not run["stored"]:
                found[run["workers"]] = run["seconds"]
        except (ValueError, KeyError, TypeError):
            continue  # cut by a kill
    return found


def _plan(steps: Iterable[Step]) -> str:
    return digest.of_values(sorted(step.id for step in steps))
