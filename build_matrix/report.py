"""What the command line shows: a line a unit while building, and the table of work units with time and
bytes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from build_matrix import wheel
from build_matrix.store import Result

console = Console(stderr=True)


def size(count: int) -> str:
    """1.2 MB of 1234567."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def tell(result: Result) -> None:
    """One line a unit that was really made."""
    if not result.stored:
        unit = result.unit
        console.print(
            f"  {unit.kind:<8} {unit.name:<40} {result.seconds:6.1f} s {size(result.size):>9}",
            highlight=False,
        )


def units_table(results: list[Result], wall: float) -> None:
    """One row a kind of work unit."""
    table = Table(title="work units", title_justify="left", box=None, pad_edge=False)
    for heading, justify in (
        ("kind", "left"),
        ("units", "right"),
        ("made", "right"),
        ("seconds", "right"),
    ):
        table.add_column(heading, justify=justify)
    table.add_column("bytes", justify="right")
    unique = {result.folder: result for result in results}.values()
    for kind in dict.fromkeys(result.unit.kind for result in unique):
        rows = [result for result in unique if result.unit.kind == kind]
        made = [result for result in rows if not result.stored]
        seconds = sum(result.seconds for result in made)
        table.add_row(kind, str(len(rows)), str(len(made)), f"{seconds:.1f}", size(sum(r.size for r in rows)))
    console.print(table)
    console.print(f"{wall:.1f} s of wall time", highlight=False)


def wheel_table(path: Path) -> None:
    """What the parts of a wheel weigh, compressed."""
    console.print(f"{path.name}: {size(path.stat().st_size)}", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("bytes", justify="right")
    for part, count in wheel.sizes(path).items():
        table.add_row(part, size(count))
    console.print(table)
