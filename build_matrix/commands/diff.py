"""`python -m build_matrix diff`."""

from __future__ import annotations

import json

import click

from build_matrix.commands.options import FILE
from build_matrix.farm.report import printed
from build_matrix.wheels.wheel_file import WheelFile, difference


@click.command("diff")
@click.argument("old", type=FILE)
@click.argument("new", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(old, new, as_json) -> None:
    """How two wheels differ: facts, files, code objects, kernels. Exit code 1 when they do."""
    found = difference(WheelFile(old), WheelFile(new))
    click.echo(json.dumps(found, indent=1)) if as_json else _show(found)
    if found["facts"] or any(found["files"].values()):
        raise click.exceptions.Exit(1)


def _show(found: dict) -> None:
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
