"""How far a farm is: steps, cache hits, time left."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from build_matrix.farm import costs, report
from build_matrix.farm.plan import Plan
from build_matrix.farm.steps import Done
from build_matrix.parts import bindings
from build_matrix.spec import matrix
from build_matrix.store import Result, Store
from build_matrix.toolchains import headers, pythons


def clock(seconds: float) -> str:
    """0:07 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Farm:
    """Counts steps as they are done. `left` is the time that `workers` need for the rest by the plan, scaled
    by how what was made compares with what it was thought to cost."""

    def __init__(self, plan: Plan, seconds: dict[str, float], workers: int):
        """`seconds`: what each step is thought to cost (costs.Costs.expected)."""
        self.plan, self.workers, self.seconds = plan, max(workers, 1), seconds
        self.done: dict[str, Done] = {}

    def add(self, done: Done | Result) -> None:
        """Takes note of a step that is done."""
        self.done[f"{done.kind} {done.name}"] = done

    @property
    def hits(self) -> int:
        """Steps whose output was stored."""
        return sum(done.stored for done in self.done.values())

    @property
    def pace(self) -> float:
        """Seconds that a step took for each second that was expected."""
        made = [(n, done.seconds) for n, done in self.done.items() if not done.stored and n in self.seconds]
        expected = sum(self.seconds[name] for name, _ in made)
        return sum(seconds for _, seconds in made) / expected if expected > 1 else 1.0

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.pace * costs.simulate(self.plan.steps, self.seconds, self.workers, self.done)

    def words(self) -> str:
        """12 stored, 3 made, 4:05 left"""
        made = len(self.done) - self.hits
        return f"{self.hits} stored, {made} made, {clock(self.left)} left"


class Live:
    """A bar on a terminal; elsewhere a line now and then, which is all that a log can use."""

    EVERY = 15.0  # seconds between lines of a log

    def __init__(self, farm: Farm):
        self.farm, self.told = farm, time.monotonic()
        columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        self.bar = Progress(*columns, console=report.console, disable=not report.console.is_terminal)
        self.task = self.bar.add_task(farm.words(), total=len(farm.plan.steps))

    def __enter__(self) -> Live:
        self.bar.start()
        return self

    def __exit__(self, *fault) -> None:
        self.bar.stop()

    def __call__(self, done: Done | Result) -> None:
        self.farm.add(done)
        report.tell(done)
        now = time.monotonic()
        # The rest is simulated for each estimate: not for every hit of a warm store.
        if done.stored and now - self.told < 1 and len(self.farm.done) < len(self.farm.plan.steps):
            self.bar.update(self.task, completed=len(self.farm.done))
            return
        if self.bar.disable and now - self.told < self.EVERY:
            return
        self.told = now
        words = self.farm.words()
        self.bar.update(self.task, completed=len(self.farm.done), description=words)
        if self.bar.disable:
            report.console.print(
                f"{len(self.farm.done)}/{len(self.farm.plan.steps)} {words}", highlight=False
            )


def of_wheels(made: Plan, store: Store, jobs: int) -> Live:
    """The bar of a build of wheels, which an Engine tells what is done. What is built, how to build less, and how long
    it is thought to take is said at once."""
    wheels = [step for step in made.steps if step.kind == "wheel"]
    for wheel in wheels:
        _, _, torches, archs, platform = wheel.arguments
        portable = wheel.needs and matrix.load().platform(platform).windows
        of = (
            f"torch {torches.replace(' ', ', ')}"
            if torches
            else "every torch"
            if portable
            else "Python alone"
        )
        packs = f", packs {archs.replace(' ', ', ')}" if archs else ""
        words = f"{wheel.name}: {of}{packs}"
        report.console.print(words, highlight=False, soft_wrap=True)
    torches = wheels[0].arguments[2].split() if wheels else []
    if len(torches) > 1:
        words = f"  a wheel for one torch is made sooner: --torch {_own_torch(torches)}"
        report.console.print(words, highlight=False)
    stored = costs.stored(made.steps, store) | _of_installed(made, store)
    expected = costs.Costs(store).expected(made.steps, stored)
    # Headers are fetched before anything is compiled, and told by nobody.
    left = Plan(tuple(step for step in made.steps if step.kind != "headers"))
    took = clock(costs.simulate(made.steps, expected, jobs))
    report.console.print(f"{len(left.steps)} steps, about {took} on {jobs} cores", highlight=False)
    return Live(Farm(left, expected, jobs))


def _own_torch(releases: list[str]) -> str:
    """Of the releases that a wheel has bindings for, that of the installed torch; the newest where none is of it."""
    have = matrix.minor(headers.installed_version() or "0.0")
    return next((release for release in releases if matrix.minor(release) == have), releases[-1])


def _of_installed(made: Plan, store: Store) -> set[str]:
    """The stored steps that a wheel takes from the installed torch: a farm, by which steps are known, does not."""
    have, found = (headers.installed_version() or "").partition("+")[0], set()
    for step in made.steps:
        if step.kind in ("headers", "3a", "3b") and (step.arguments[0], step.arguments[-1]) == (
            have,
            matrix.NATIVE,
        ):
            torch = headers.obtain(have, store)
            units = {"3a": bindings.torch_library, "3b": bindings.python_module}
            more = [pythons.find(step.arguments[1])] if step.kind == "3b" else []
            if step.kind == "headers" or store.folder(units[step.kind](torch, *more)).is_dir():
                found.add(step.id)
    return found
