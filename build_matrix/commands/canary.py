"""`python -m build_matrix canary`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from build_matrix import REPOSITORY
from build_matrix.check import canary
from build_matrix.commands.options import FILE, torches_of
from build_matrix.errors import BuildError, LoadError
from build_matrix.farm import report
from build_matrix.parts import tree
from build_matrix.store import Store, files
from build_matrix.store.engine import Engine
from build_matrix.toolchains import pythons, slim_torch
from build_matrix.wheels import build

DEFAULT = REPOSITORY / "build/canary"


@click.command("canary")
@click.argument("wheel", type=FILE, required=False)
@click.option(
    "--torch",
    "torches",
    multiple=True,
    callback=torches_of,
    help="Default: the newest release, and a newer pre-release.",
)
@click.option("--release-only", is_flag=True, help="No pre-release.")
@click.option("--report", "written", type=FILE, help="A JSON file to write, after each torch.")
def command(wheel, torches, release_only, written) -> None:
    """What WHEEL (default: apex-cpu of this checkout, without a binding of any torch) serves under the newest torch of
    pip's index. Exit code 5 where no kernel does, or one gives other bits; where a torch was not tried, that of what
    kept it away: 7 of the index."""
    if written:
        written.parent.mkdir(parents=True, exist_ok=True)
        # Where nothing can be written, it is said first; no older report is taken for this one's.
        _write(written, [])
    store, python = Store(), pythons.find(pythons.own_tag())
    found, faults = [], []
    with files.temporary("canary") as folder:
        installed = canary.unpack(wheel or _own(python, store), folder / "wheel")
        _, expected = slim_torch.wheel_values(None, python, installed, store)
        for version in torches or canary.newest(python, before=not release_only):
            try:
                found.append(canary.run(version, python, installed, expected, store))
            except BuildError as error:
                found.append(canary.Found(version, "", 0, error=str(error), tried=False))
                faults.append(error)
            click.echo(found[-1])
            if written:
                _write(written, found)
    if bad := [one.torch for one in found if one.tried and not one.well]:
        raise LoadError(f"under torch {', '.join(bad)} the wheel does not serve as it should, as said above")
    if faults:
        raise faults[0]


def _write(path: Path, found: list[canary.Found]) -> None:
    files.write(path, json.dumps(canary.report(found), indent=1) + "\n")


def _own(python, store) -> Path:
    """The wheel of this checkout as a torch of next year meets it: with no binding of its own."""
    request = tree.Request(accelerator="cpu", torch=(), pythons=(python,))
    return build.one_wheel(request, python, Engine(store, tell=report.tell), DEFAULT)
