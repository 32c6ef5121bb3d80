"""`python -m build_matrix which`."""

from __future__ import annotations

import click

from build_matrix.commands.options import PASSED_ON
from build_matrix.serve import which


@click.command("which", **PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments) -> None:
    """The one pip line for this interpreter, its torch and its cards."""
    raise click.exceptions.Exit(which.main(list(arguments)))
