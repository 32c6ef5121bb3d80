"""`python -m build_matrix explain`."""

from __future__ import annotations

import json

import click

from build_matrix.commands.options import FILE, PUBLIC_KEY
from build_matrix.errors import BuildError
from build_matrix.farm.report import printed, size, table
from build_matrix.wheels import signing
from build_matrix.wheels.wheel_file import WheelFile


@click.command("explain")
@click.argument("wheel", type=FILE)
@click.option("--arch", help="Also every kernel of that pack.")
@PUBLIC_KEY
@click.option("--json", "as_json", is_flag=True, help="For programs: everything.")
def command(wheel, arch, key, as_json) -> None:
    """What is inside a wheel: source, compilers, pins, bindings, packs, kernels, sizes; and who signed it. Exit code 13
    when it is not signed by the key that was named."""
    about = WheelFile(wheel).about()
    key = signing.trusted(key)
    verified = signing.verify(wheel, key) if key else None
    about["signed"] = {keyid: keyid == verified for keyid in signing.signers(wheel)}
    if arch and arch not in about["packs"]:
        raise BuildError(f"{wheel.name} has no pack for {arch}; it has {', '.join(about['packs']) or 'none'}")
    if as_json:
        packs = {name: pack for name, pack in about["packs"].items() if arch in (None, name)}
        click.echo(json.dumps(about | {"packs": packs}, indent=1))
        return
    _show_origin(about)
    _show_bindings(about["bindings"])
    _show_packs(about["packs"])
    if arch:
        _show_kernels(arch, about["packs"][arch])


def _show_origin(about: dict) -> None:
    printed.print(f"{about['wheel']}: {size(about['bytes'])}")
    printed.print(f"sha256  {about['sha256']}\nfor     {about['platform']}, {about['tag']}")
    printed.print(f"version {about['version']}\nsource  {about['source_sha256']}")
    for keyid, verified in about["signed"].items():
        printed.print(f"signed  by key {keyid[:12]}{'' if verified else ', not verified: --key PUBLIC'}")
    for compiler in about["compilers"]:
        printed.print(f"{compiler['name']} {compiler['version']}  sha256 {compiler['sha256']}")
    for name, sha in about["pins"].items():
        printed.print(f"{name}  {sha}")


def _show_bindings(bindings: list[dict]) -> None:
    if not bindings:
        return
    shown = table("binding", "Python", "built against", "grade", "compressed", left=4)
    for row in bindings:
        name = f"torch {row['torch']}"
        shown.add_row(name, row["python"], row["built_against"], row["grade"], size(row["bytes"]))
    printed.print(shown)


def _show_packs(packs: dict[str, dict]) -> None:
    if not packs:
        return
    shown = table("pack", "compiler", "units", "kernels", "bytes", "compressed", left=2)
    for name, pack in packs.items():
        compiler = f"{pack['compiler']['name']} {pack['compiler']['version']}"
        kernels = sum(len(unit["kernels"]) for unit in pack["units"].values())
        sizes = (size(pack["bytes"]), size(pack["packed"]))
        shown.add_row(name, compiler, str(len(pack["units"])), str(kernels), *sizes)
    printed.print(shown)


def _show_kernels(arch: str, pack: dict) -> None:
    shown = table("kernel", "registers", "spilled", "shared", left=1)
    for unit in pack["units"].values():
        for name, kernel in unit["kernels"].items():
            columns = ("registers", "spill_bytes", "shared_bytes")
            shown.add_row(name, *(str(kernel[column]) for column in columns))
    printed.print(f"{arch}: {' '.join(pack['flags'])}")
    printed.print(shown)
