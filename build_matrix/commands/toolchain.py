"""`python -m build_matrix toolchain`."""

from __future__ import annotations

import click

from build_matrix.toolchains import manage


@click.command("toolchain")
@click.argument("names", nargs=-1)
@click.option("--update", is_flag=True, help="Moves the pins to what is here, or to what the index holds.")
def command(names, update) -> None:
    """Shows every toolchain of the matrix; with NAMES, brings them here."""
    if update:
        manage.update()
    for name in names:
        manage.bring(name)
    manage.show()
