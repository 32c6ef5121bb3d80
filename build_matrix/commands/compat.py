"""`python -m build_matrix compat`."""

from __future__ import annotations

import click

from build_matrix.commands.options import PASSED_ON
from build_matrix.serve import compat


@click.command("compat", **PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments) -> None:
    """Which apex serves a machine. Exit code 2 when none does; then the nearest cells are listed."""
    raise click.exceptions.Exit(compat.main(list(arguments)))
