"""`python -m build_matrix canary`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from build_matrix import REPOSITORY
from build_matrix.check import canary
from build_matrix.commands.options import FILE
from build_matrix.errors import BuildError
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
    "--torch", "torches", multiple=True, help="Default: the newest release, and a newer pre-release."
)
@click.option("--release-only", is_flag=True, help="No pre-release.")
@click.option("--report", "written", type=FILE, help="A JSON file to write.")
def command(wheel, torches, release_only, written) -> None:
    """What WHEEL (default: apex-cpu of this checkout, without a binding of any torch) serves under the newest torch of
    pip's index. Exit code 5 where no kernel does, or one gives other bits."""
    store, python = Store(), pythons.find(pythons.own_tag())
    with files.temporary("canary") as folder:
        installed = canary.unpack(wheel or _own(python, store), folder / "wheel")
        _, expected = slim_torch.wheel_values(None, python, installed, store)
        found = []
        for version in torches or canary.newest(python, before=not release_only):
            found.append(canary.run(version, python, installed, expected, store))
            click.echo(found[-1])
    if written:
        files.write(written, json.dumps(canary.report(found), indent=1) + "\n")
    if bad := [one.torch for one in found if not one.well]:
        raise BuildError(f"under torch {', '.join(bad)} the wheel does not serve as it should, as said above")


def _own(python, store) -> Path:
    """The wheel of this checkout as a torch of next year meets it: with no binding of its own."""
    request = tree.Request(accelerator="cpu", torch=(), pythons=(python,))
    return build.one_wheel(request, python, Engine(store, tell=report.tell), DEFAULT)
