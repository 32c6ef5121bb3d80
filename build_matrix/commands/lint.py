"""`python -m build_matrix lint`."""

from __future__ import annotations

import click

from build_matrix.check import lint


@click.command("lint")
def command() -> None:
    """Style, formats, shell scripts and types, of everything. Exit code 1 where one of the tools found something."""
    if not lint.run():
        raise click.exceptions.Exit(1)
