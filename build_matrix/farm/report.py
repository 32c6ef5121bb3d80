"""What the command line shows: a line a unit while building, and the table of work units with time and
bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from build_matrix.store import Result
from build_matrix.wheels import wheel

if TYPE_CHECKING:
    from build_matrix.farm.steps import Done

console = Console(stderr=True)


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


def units_table(results: list[Result] | list[Done], wall: float) -> None:
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
    unique = {(result.kind, result.key): result for result in results}.values()
    for kind in dict.fromkeys(result.kind for result in unique):
        rows = [result for result in unique if result.kind == kind]
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


def plan_table(plan, known, store, workers: tuple[int, ...]) -> None:
    """Steps by kind: how many there are and are stored, and the seconds of the rest; then how long so many
    workers would need for the rest, and for everything from nothing."""
    from build_matrix.farm import costs

    stored = costs.stored(plan.steps, store)
    cold, warm = known.expected(plan.steps), known.expected(plan.steps, stored)
    table = Table(title="steps", title_justify="left", box=None, pad_edge=False)
    table.add_column("kind")
    for heading in ("steps", "stored", "seconds left", "seconds from nothing"):
        table.add_column(heading, justify="right")
    for kind, count in plan.count().items():
        names = [step.id for step in plan.steps if step.kind == kind]
        sums = (f"{sum(seconds[name] for name in names):.0f}" for seconds in (warm, cold))
        table.add_row(kind, str(count), str(len(stored.intersection(names))), *sums)
    console.print(table)
    workers_table(plan, cold, warm, store, workers)
    shares_table(plan, cold)


def workers_table(plan, cold: dict, warm: dict, store, workers: tuple[int, ...]) -> None:
    """How long a fleet needs, by the plan run in simulation, and what it took where somebody ran it from nothing."""
    from build_matrix.farm import costs

    took = costs.measured(store, plan.steps)
    table = _table("workers", "seconds left", "from nothing", "measured", left=0)
    for count in sorted({*workers, *took}):
        left, nothing = (costs.simulate(plan.steps, seconds, count) for seconds in (warm, cold))
        table.add_row(
            str(count), f"{left:.0f}", f"{nothing:.0f}", f"{took[count]:.0f}" if count in took else ""
        )
    path = max(costs.ranks(plan.steps, cold).values(), default=0.0)
    table.add_row("endless", "", f"{path:.0f}", "")
    console.print(table)


def shares_table(plan, seconds: dict) -> None:
    """The sum against the product: what each part takes once, and if every cell were compiled by itself."""
    from build_matrix.farm import costs

    cells, shares = costs.sum_and_product(plan.steps, seconds)
    if not cells:
        return
    table = _table(f"{cells} cells (torch, Python, arch)", "minutes", "each by itself")
    whole = costs.Share("together", sum(s.once for s in shares), sum(s.apart for s in shares))
    for share in [*shares, whole]:
        table.add_row(share.part, f"{share.once / 60:.1f}", f"{share.apart / 60:.0f}")
    console.print(table)


printed = Console(soft_wrap=True, highlight=False)  # answers go to standard output


def _table(*headings: str, left: int = 1) -> Table:
    """A plain table whose first `left` columns are text and the others numbers."""
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    return table


def explain(about: dict, arch: str | None) -> None:
    """What `explain` shows; with `arch`, every kernel of that pack."""
    printed.print(f"{about['wheel']}: {size(about['bytes'])}")
    printed.print(f"sha256  {about['sha256']}\nfor     {about['platform']}, {about['tag']}")
    printed.print(f"version {about['version']}\nsource  {about['source_sha256']}")
    for keyid, verified in about["signed"].items():
        printed.print(f"signed  by key {keyid[:12]}{'' if verified else ', not verified: --key PUBLIC'}")
    for compiler in about["compilers"]:
        printed.print(f"{compiler['name']} {compiler['version']}  sha256 {compiler['sha256']}")
    for name, sha in about["pins"].items():
        printed.print(f"{name}  {sha}")
    if about["bindings"]:
        table = _table("binding", "Python", "built against", "grade", "compressed", left=4)
        for row in about["bindings"]:
            name = f"torch {row['torch']}"
            table.add_row(name, row["python"], row["built_against"], row["grade"], size(row["bytes"]))
        printed.print(table)
    if about["packs"]:
        table = _table("pack", "compiler", "units", "kernels", "bytes", "compressed", left=2)
        for name, pack in about["packs"].items():
            compiler = f"{pack['compiler']['name']} {pack['compiler']['version']}"
            kernels = sum(len(unit["kernels"]) for unit in pack["units"].values())
            sizes = (size(pack["bytes"]), size(pack["packed"]))
            table.add_row(name, compiler, str(len(pack["units"])), str(kernels), *sizes)
        printed.print(table)
    if arch:
        table = _table("kernel", "registers", "spilled", "shared", left=1)
        for unit in about["packs"][arch]["units"].values():
            for name, kernel in unit["kernels"].items():
                columns = ("registers", "spill_bytes", "shared_bytes")
                table.add_row(name, *(str(kernel[column]) for column in columns))
        printed.print(f"{arch}: {' '.join(about['packs'][arch]['flags'])}")
        printed.print(table)


def difference(found: dict) -> None:
    """What `diff` shows."""
    for name, (old, new) in found["facts"].items():
        printed.print(f"{name}: {old} -> {new}", markup=False)
    for what, names in found["files"].items():
        for name in names:
            printed.print(f"{what} {name}", markup=False)
    for name, unit in found["units"].items():
        old, new = unit["bytes"]
        printed.print(f"code {name}: {old} -> {new} bytes, source {unit['source']}")
        for kernel, (before, after) in unit["kernels"].items():
            printed.print(f"  {kernel}: {_resources(before)} -> {_resources(after)}")
    if not found["facts"] and not any(found["files"].values()):
        printed.print("the contents are the same")


def _resources(kernel: dict | None) -> str:
    if kernel is None:
        return "absent"
    return f"{kernel['registers']} registers, {kernel['spill_bytes']} bytes spilled"
