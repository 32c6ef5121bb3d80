"""`python -m build_matrix receipts`."""

from __future__ import annotations

import click

from build_matrix.check import receipts
from build_matrix.commands.options import PATH, writable
from build_matrix.errors import ReceiptError
from build_matrix.spec import identity


@click.group("receipts")
def command() -> None:
    """What runs of the tests saw, and which of it counts."""


@command.command()
@click.argument("files", nargs=-1, required=True, type=PATH)
@click.option("--into", type=PATH, help="Default: build_matrix/receipts.")
def merge(files, into) -> None:
    """Takes receipts of other machines: files, or folders of them. Exit code 12 when any is cut, was changed, is a
    duplicate or none, or a folder holds none; the others are taken all the same."""
    into = into or receipts.FOLDER
    writable(into, "--into")
    found = {file: sorted(file.glob("*.json")) if file.is_dir() else [file] for file in files}
    empty = [ReceiptError(str(file), "there is no receipt in it") for file in found if not found[file]]
    paths = [path for each in found.values() for path in each]
    taken, refused = receipts.merge(paths, into)
    for receipt in taken:
        _tell(receipt)
    refused = [*empty, *refused]
    for error in refused:
        click.echo(f"not taken: {error}", err=True)
    if refused:
        raise click.exceptions.Exit(ReceiptError.exit_code)


@command.command(name="list")
def show() -> None:
    """Every receipt here, and whether it counts for this checkout."""
    found = receipts.load()
    if not found:
        click.echo("there are no receipts here. Run: nox -s 'L0(cpu)'", err=True)
    for receipt in found:
        _tell(receipt)


def _tell(receipt: dict) -> None:
    why = receipts.why_not(receipt, identity.checkout())
    click.echo(f"{receipts.words(receipt)}: {f'does not count here: {why}' if why else 'counts'}")
