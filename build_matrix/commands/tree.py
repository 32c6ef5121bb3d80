"""`python -m build_matrix tree`."""

from __future__ import annotations

import time

import click

from build_matrix.commands.options import JOBS, PATH, tags_of, writable
from build_matrix.errors import BuildError
from build_matrix.farm import report
from build_matrix.parts import tree
from build_matrix.spec import matrix
from build_matrix.spec.registry import device_units
from build_matrix.store import Store
from build_matrix.store.engine import Engine
from build_matrix.toolchains import by_arch, headers, pythons


@click.command("tree")
@click.option(
    "--arch", "archs", multiple=True, help="sm_90, gfx942, ...; several may be given. Default: none."
)
@click.option("--python", "tags", multiple=True, help="3.11, ...; default: the Python that runs this.")
@click.option("--torch", "torches", multiple=True, help="2.13.0, ...; default: the torch that is installed.")
@JOBS
@click.option("--target", type=PATH, help="Default: build/tree.")
@click.option("--available", is_flag=True, help="Leaves out packs whose toolchain is not here, and says so.")
@click.option(
    "--unit", "units", multiple=True, help="Units of the packs; several may be given. Default: all."
)
def command(archs, tags, torches, jobs, target, available, units) -> None:
    """Fills build/tree/apex with libraries and packs, for use in a checkout."""
    target = target or tree.DEFAULT
    writable(target, "--target")
    tree.check_target(target)
    start = time.monotonic()
    if available:
        archs = by_arch.available(archs, lambda why: click.echo(f"left out: {why}", err=True))
    vendors = {matrix.load().pack(arch).arch.vendor for arch in archs}
    torch = torches or tuple(filter(None, [headers.installed_version()]))
    if not torch:
        raise BuildError("no torch is installed here: name one with --torch 2.13.0")
    request = tree.Request(
        accelerator=vendors.pop() if len(vendors) == 1 else "cpu",
        archs=tuple(archs),
        torch=torch,
        pythons=tuple(map(pythons.find, tags_of(tags))),
        units=_units(units),
    )
    engine = Engine(Store(), jobs, report.tell)
    tree.fill(request, target, engine)
    report.units_table(engine.finished, time.monotonic() - start)


def _units(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Units that were named, each of them known; None for all."""
    if unknown := sorted(set(names) - {path.stem for path in device_units()}):
        raise click.BadParameter(f"{unknown[0]} is no unit of csrc/device", param_hint="--unit")
    return names or None
