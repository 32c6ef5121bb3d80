"""How far a farm is: steps, cache hits, time left."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from build_matrix import report
from build_matrix.farm import costs
from build_matrix.farm.plan import Plan
from build_matrix.farm.steps import Done


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

    def add(self, done: Done) -> None:
        """Takes note of a step that is done."""
        self.done[f"{done.kind} {done.name}"] = done

    @property
    def hits(self) -> int:
        """Steps whose output was stored."""
        return sum(done.stored for done in self.done.values())

    @property
    def pace(self) -> float:
        """Seconds that a step took for each second that was expected."""
        made = [(name, done.seconds) for name, done in self.done.items() if not done.stored]
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

    def __call__(self, done: Done) -> None:
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
