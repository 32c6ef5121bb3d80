"""`python -m build_matrix variants`."""

from __future__ import annotations

import click

from build_matrix import REPOSITORY
from build_matrix.commands.options import DIST, PATH, wheels_of, writable
from build_matrix.wheels import variants


@click.command("variants")
@DIST
@click.option(
    "--target",
    type=PATH,
    default=REPOSITORY / "dist/variants",
    help="Default: dist/variants/.",
)
def command(dist, target) -> None:
    """Writes the wheels of dist/ as variants of one project (PEP 817), with the metadata of an index."""
    writable(target, "--target")
    for path in variants.write(wheels_of(dist), target):
        click.echo(str(path))
