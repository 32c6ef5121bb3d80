"""`python -m build_matrix tests`."""

from __future__ import annotations

import click

from build_matrix.check import release_check, rings, skips
from build_matrix.commands.release_check import run


@click.command("tests", context_settings={"ignore_unknown_options": True})
@click.option("--all", "everything", is_flag=True, help="Everything, in hours; goes on where it was stopped.")
@click.option("--ci", is_flag=True, help="A skip that ci/accepted_skips.toml does not accept is a fault.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(everything, ci, arguments) -> None:
    """Builds what the tests need, and runs what a change asks for; ARGUMENTS go to pytest. Exit code 1 where one
    failed."""
    if everything:
        run(release_check.everything())
    elif arguments:
        raise click.exceptions.Exit(rings.given(list(arguments), click.echo))
    elif not rings.on_a_change(click.echo, skips.ACCEPTED if ci else None):
        raise click.exceptions.Exit(1)
