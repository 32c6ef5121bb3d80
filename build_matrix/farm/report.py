"""What the command line shows: a line a unit while building, and the table of work units with time and
bytes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from build_matrix.farm import costs
from build_matrix.farm.steps import Done
from build_matrix.store import Result
from build_matrix.wheels import wheel

console = Console(stderr=True)
printed = Console(soft_wrap=True, highlight=False)  # answers go to standard output


def size(count: int) -> str:
    """1.2 MB of 1234567."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def tell(result: Result | Done) -> None:
    """One line a unit that was really made."""
    if not result.stored:
        console.print(
            f"  {result.kind:<8} {result.name:<40} {result.seconds:6.1f} s {size(result.size):>9}",
            highlight=False,
        )


def table(*headings: str, left: int = 1, title: str | None = None) -> Table:
    """A plain table whose first `left` columns are text and the others numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    return made


def units_table(results: list[Result] | list[Done], wall: float) -> None:
    """One row a kind of work unit."""
    shown = table("kind", "units", "made", "seconds", "bytes", title="work units")
    unique = {(result.kind, result.key): result for result in results}.values()
    for kind in dict.fromkeys(result.kind for result in unique):
        rows = [result for result in unique if result.kind == kind]
        made = [result for result in rows if not result.stored]
        seconds = sum(result.seconds for result in made)
        shown.add_row(kind, str(len(rows)), str(len(made)), f"{seconds:.1f}", size(sum(r.size for r in rows)))
    console.print(shown)
    console.print(f"{wall:.1f} s of wall time", highlight=False)


def wheel_table(path: Path) -> None:
    """What the parts of a wheel weigh, compressed."""
    console.print(f"{path.name}: {size(path.stat().st_size)}", highlight=False, soft_wrap=True)
    shown = table("part", "bytes")
    for part, count in wheel.sizes(path).items():
        shown.add_row(part, size(count))
    console.print(shown)


def plan_table(plan, known, store, workers: tuple[int, ...]) -> None:
    """Steps by kind: how many there are and are stored, and the seconds of the rest; then how long so many
    workers would need for the rest, and for everything from nothing."""
    stored = costs.stored(plan.steps, store)
    cold, warm = known.expected(plan.steps), known.expected(plan.steps, stored)
    shown = table("kind", "steps", "stored", "seconds left", "seconds from nothing", title="steps")
    for kind, count in plan.count().items():
        names = [step.id for step in plan.steps if step.kind == kind]
        sums = (f"{sum(seconds[name] for name in names):.0f}" for seconds in (warm, cold))
        shown.add_row(kind, str(count), str(len(stored.intersection(names))), *sums)
    console.print(shown)
    workers_table(plan, cold, warm, store, workers)
    shares_table(plan, cold)


def workers_table(plan, cold: dict, warm: dict, store, workers: tuple[int, ...]) -> None:
    """How long a fleet needs, by the plan run in simulation, and what it took where somebody ran it from nothing."""
    took = costs.measured(store, plan.steps)
    shown = table("workers", "seconds left", "from nothing", "measured", left=0)
    for count in sorted({*workers, *took}):
        left, nothing = (costs.simulate(plan.steps, seconds, count) for seconds in (warm, cold))
        measured = f"{took[count]:.0f}" if count in took else ""
        shown.add_row(str(count), f"{left:.0f}", f"{nothing:.0f}", measured)
    path = max(costs.ranks(plan.steps, cold).values(), default=0.0)
    shown.add_row("endless", "", f"{path:.0f}", "")
    console.print(shown)


def shares_table(plan, seconds: dict) -> None:
    """The sum against the product: what each part takes once, and if every cell were compiled by itself."""
    cells, shares = costs.sum_and_product(plan.steps, seconds)
    if not cells:
        return
    shown = table(f"{cells} cells (torch, Python, arch)", "minutes", "each by itself")
    whole = costs.Share("together", sum(s.once for s in shares), sum(s.apart for s in shares))
    for share in [*shares, whole]:
        shown.add_row(share.part, f"{share.once / 60:.1f}", f"{share.apart / 60:.0f}")
    console.print(shown)
